"""Timelines of ranks in the formats of profilers and viewers."""
