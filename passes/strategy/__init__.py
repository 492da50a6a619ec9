"""Passes that apply a strategy to a model: element types, kernels, and placements on a mesh."""
