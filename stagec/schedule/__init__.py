"""Pipeline schedules as pure functions: the order of actions on each rank, and an exact clock."""
