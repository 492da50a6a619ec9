"""Sharding rules and propagation as pure functions."""
