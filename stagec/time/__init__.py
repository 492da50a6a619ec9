"""Time: from a compiled step and a machine to seconds."""
