"""Reading and writing the textual IR."""
