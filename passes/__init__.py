"""The built-in passes."""
