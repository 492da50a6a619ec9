"""Functions of pipeline stages."""
