"""The garbage collector of Python, whose passes over all objects cost much of a compile."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

#: Allocations between two collections. A compile makes many long-lived objects and little garbage:
#: with the default of 700 it spends a third of its time on collections, with 200,000 a tenth.
#: Uncollected garbage is a few hundred megabytes at most.
_ALLOCATIONS = 2_000_000


@contextmanager
def seldom_collected() -> Generator[None]:
    """Collect garbage less often within the block. A higher threshold, or a disabled collector, is
    kept."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def leave_garbage() -> None:
    """Exclude all objects from collection, before the process ends. Python collects twice at exit,
    which takes a quarter of the time of a small compile, although the system frees the memory."""
    gc.freeze()
