"""How many buckets a row of sizes fills: the size with which a bucket is full closes it, none is
cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor

_ZERO = Fraction(0)
#: How often a row of sizes comes, and the sizes.
Run = tuple[Fraction, Sequence[Fraction]]


def count_buckets(full: Fraction, runs: Iterable[Run]) -> int:
    """How many buckets of at least `full` (but 1) these sizes fill, with the last one, which may
    not be. What is below zero counts as zero.

    The cost depends on the sizes in the runs, not on how often they come.
    """
    count, pending = 0, _ZERO
    for times, sizes in runs:
        given = [max(size, _ZERO) for size in sizes]
        more, pending = _run(max(full, Fraction(1)), max(0, floor(times)), given, pending)
        count += more
    return count + (pending > 0)


def _run(
    full: Fraction, left: int, sizes: Sequence[Fraction], pending: Fraction
) -> tuple[int, Fraction]:
    """The buckets that a run closes, and what the open one holds then.

    After a turn that closes one, the open bucket holds an end of that turn. There are as many ends
    as sizes, so one soon comes again, and with it all that came in between.
    """
    count, turn = 0, sum(sizes, _ZERO)
    seen: dict[Fraction, tuple[int, int]] = {}
    while turn and left:
        before = min(left, -((pending - full) // turn) - 1)  # turns that close none
        pending, left = pending + before * turn, left - before
        if pending in seen:
            left_then, count_then = seen[pending]
            times, left = divmod(left, left_then - left)
            count += times * (count - count_then)
            seen.clear()
        if left:
            seen[pending] = left, count
            closed, pending = _turn(full, sizes, pending)
            count, left = count + closed, left - 1
    return count, pending


def _turn(full: Fraction, sizes: Sequence[Fraction], pending: Fraction) -> tuple[int, Fraction]:
    count = 0
    for size in sizes:
        pending += size
        if pending >= full:
            count, pending = count + 1, _ZERO
    return count, pending
