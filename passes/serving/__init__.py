"""Passes that turn the training forward into a step of serving."""
