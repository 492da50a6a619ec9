"""Requests to a server over time: what users meet, and what its ranks do meanwhile."""
