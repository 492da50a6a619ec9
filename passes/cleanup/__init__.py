"""Passes that only tidy up."""
