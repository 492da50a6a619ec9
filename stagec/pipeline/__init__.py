"""Passes, pipeline specs, the pass manager and plug-ins."""
