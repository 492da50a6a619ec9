"""Traces of what runs when, for Perfetto."""
