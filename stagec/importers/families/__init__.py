"""The readers of families: which keys say what a model computes."""
