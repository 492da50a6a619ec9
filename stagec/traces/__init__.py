"""Writing jobs: folders, archives, worker processes and clusters."""
