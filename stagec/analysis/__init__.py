"""Counts over a module: FLOPs, bytes, communication, memory."""
