"""Serving as pure functions: requests, batching policies, and the steps that follow from both."""
