"""Seconds: of kernels, of communication, and of a step."""
