"""How many processors this process may use."""

from __future__ import annotations

import os


def processors() -> int:
    """The processors that the system gives this process, or, where it does not say that (macOS,
    Windows), those of the machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
