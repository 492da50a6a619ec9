"""A file without a PLUGIN."""
