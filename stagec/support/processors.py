"""The number of processors that this process may use."""

import os


def processors() -> int:
    """The number of processors available to this process, or of the machine if the system does not
    report it (macOS, Windows)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
