"""The readers of families, from keys of configurations to texts."""
