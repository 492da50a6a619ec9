"""Python's collector of garbage, which looks through all objects again and again."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

#: Objects between two looks for garbage. A compile makes many that stay, and little garbage: at
#: Python's default of 700 it spends a third of its time on looking, at 200,000 a tenth. What waits
#: to be found is a few hundred megabytes at most.
_ALLOCATIONS = 2_000_000


@contextmanager
def seldom_collected() -> Generator[None]:
    """Look for garbage seldom for the time being. Who looks less often, or never, goes on so."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def leave_garbage() -> None:
    """Before the end of the process: look at no object again. Python looks for garbage twice more
    when it ends, a quarter of the time of a small compile, and the system takes the memory back."""
    gc.freeze()
