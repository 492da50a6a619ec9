"""Blocks that the models of the library share."""
