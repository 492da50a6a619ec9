"""The training step: gradients and optimizer."""
