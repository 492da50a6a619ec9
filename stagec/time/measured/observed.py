"""Joins traces of one or many ranks to a table of medians.

A collective ends on all ranks at one time and begins on each rank when that reaches it, so its time
on a rank includes the wait for the others. The time of a call is therefore the least over the
ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from stagec.time.measured.kernel_tables import Key
from stagec.time.measured.kineto import Group, Reading

Row = tuple[Key, float, int]


def rows(readings: Sequence[Reading]) -> list[Row]:
    """The rows of a table: kernel or collective, the median of its seconds, and their number."""
    together: dict[Key, list[float]] = defaultdict(list)
    for reading in readings:
        for key, times in reading.kernels.items():
            together[key] += times
    for key, seconds in _collectives(readings):
        together[key].append(seconds)
    medians = [(key, float(np.median(times)), len(times)) for key, times in together.items()]
    return [row for row in medians if row[1] > 0]


def _collectives(readings: Sequence[Reading]) -> Iterator[tuple[Key, float]]:
    """Each call of a group, once, with the least time over the ranks that were traced."""
    calls: dict[tuple[int, Group], list[list[tuple[Key, float]]]] = defaultdict(list)
    seen: dict[int | None, int] = defaultdict(int)
    for number, reading in enumerate(readings):
        # several traces of one rank were recorded one after the other
        rank = reading.rank if reading.rank is not None else -1 - number
        for group, some in reading.collectives.items():
            calls[seen[rank], group].append(some)
        seen[rank] += 1
    for of_ranks in calls.values():
        alike = len({tuple(key for key, _ in some) for some in of_ranks}) == 1
        if alike:
            for same in zip(*of_ranks, strict=True):
                yield same[0][0], min(seconds for _, seconds in same)
        else:
            yield from (call for some in of_ranks for call in some)
