"""File formats of traces, a folder each."""
