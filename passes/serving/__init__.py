"""Passes that turn the forward step of training into the step of a server."""
