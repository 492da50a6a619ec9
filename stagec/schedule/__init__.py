"""Pipeline schedules as pure functions: who does what in which order, and an exact clock."""
