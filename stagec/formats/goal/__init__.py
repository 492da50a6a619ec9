"""GOAL: the schedules of messages and computations that LogGOPSim and ATLAHS run."""
