"""What runs when, on which stream, as profilers and viewers have it."""
