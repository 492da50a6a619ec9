"""File formats of traces."""
