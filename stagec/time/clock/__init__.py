"""When each node of a step runs: what that means (`definition`), and how it is found (`loop`)."""
