"""stagec: a compiler from symbolic tensor graphs to execution traces of distributed LLM jobs."""

__version__ = "0.1.0"
