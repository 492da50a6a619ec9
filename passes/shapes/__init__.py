"""Sizes: shape inference and numbers for symbols."""
