"""Sizes: inlining, shape inference, and values of symbols."""
