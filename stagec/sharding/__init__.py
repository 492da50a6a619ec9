"""Placement as pure functions: factor assignments, propagation, resharding, strategies."""
