"""Shared parts of the readers of families: from keys of a configuration to parts of a text."""
