"""Liveness and memory planning as pure functions."""
