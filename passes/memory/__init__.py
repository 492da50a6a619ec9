"""Lifetimes of buffers, and where they lie."""
