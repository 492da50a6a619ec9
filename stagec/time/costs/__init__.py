"""Seconds of kernels, collectives and messages on a machine, and of the nodes that they are."""
