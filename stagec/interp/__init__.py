"""The numeric reference interpreter."""
