"""Execution traces: graph, rank classes, file format, checker."""
