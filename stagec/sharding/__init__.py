"""Placement: factor assignments, propagation, resharding, and strategies as data."""
