"""Pipeline schedules as pure functions: who does what in which order, replayed on an exact clock."""
