"""Texts of stacks: what software releases make of programs."""
