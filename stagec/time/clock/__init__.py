"""When each node of a step runs: what that means (`definition`), and its fast form (`replay`)."""
