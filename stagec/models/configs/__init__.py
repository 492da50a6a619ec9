"""Configurations of models, from which the library writes their texts."""
