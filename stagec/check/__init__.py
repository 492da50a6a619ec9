"""Proofs about jobs: form, order, agreement of ranks, deadlock."""
