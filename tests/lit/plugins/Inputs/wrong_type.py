"""A PLUGIN of the wrong type."""

PLUGIN = "example"
