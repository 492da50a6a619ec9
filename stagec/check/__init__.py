"""Checks of jobs: form, order, agreement of ranks, freedom from deadlock."""
