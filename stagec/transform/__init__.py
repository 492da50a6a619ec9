"""Rewrites of whole functions: strategy, microbatches, differentiation, optimizer, unit
collectives."""
