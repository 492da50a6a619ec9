"""Configurations, read with the place of every mistake."""
