"""Puts a model on a mesh as its strategy says."""
