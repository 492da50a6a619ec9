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
    count, held = 0, _ZERO
    for times, sizes in runs:
        given = [max(size, _ZERO) for size in sizes]
        more, held = _run(max(full, Fraction(1)), max(0, floor(times)), given, held)
        count += more
    return count + (held > 0)


def _run(
    full: Fraction, left: int, sizes: Sequence[Fraction], held: Fraction
) -> tuple[int, Fraction]:
    """The buckets that a run closes, and what the open one holds then.

    After a turn that closes one, the open bucket holds an end of that turn. There are as many ends
    as sizes, so one soon comes again, and with it all that came in between.
    """
    count, turn = 0, sum(sizes, _ZERO)
    seen: dict[Fraction, tuple[int, int]] = {}
    while turn and left:
        before = min(left, -((held - full) // turn) - 1)  # turns that close none
        held, left = held + before * turn, left - before
        if held in seen:
            left_then, found_then = seen[held]
            times, left = divmod(left, left_then - left)
            count += times * (count - found_then)
            seen.clear()
        if left:
            seen[held] = left, count
            closed, held = _turn(full, sizes, held)
            count, left = count + closed, left - 1
    return count, held


def _turn(full: Fraction, sizes: Sequence[Fraction], held: Fraction) -> tuple[int, Fraction]:
    count = 0
    for size in sizes:
        held += size
        if held >= full:
            count, held = count + 1, _ZERO
    return count, held
