"""Texts of models as a person writes them: blocks, stacks of layers, towers."""
