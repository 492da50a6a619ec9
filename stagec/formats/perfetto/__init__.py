"""Timelines for Perfetto."""
