"""Passes for lifetimes of buffers, their offsets, and host memory."""
