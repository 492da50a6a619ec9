"""What a rank holds: liveness of buffers and the bytes of a training step."""
