"""The number of buckets that a sequence of sizes fills. The size that fills a bucket closes it; no
size is split."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor

_ZERO = Fraction(0)
#: A repetition count, and the sizes that repeat.
Run = tuple[Fraction, Sequence[Fraction]]


def count_buckets(full: Fraction, runs: Iterable[Run]) -> int:
    """The number of buckets of at least `full` (at least 1) that these sizes fill, including the
    last, partial one. Negative sizes count as zero.

    The cost depends on the number of sizes in the runs, not on the repetition counts.
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
    """The number of buckets that a run closes, and the content of the open one afterwards.

    After a repetition that closes a bucket, the open one contains a suffix of that repetition.
    There are as many suffixes as sizes, so the state soon recurs, and whole periods are skipped.
    """
    count, turn = 0, sum(sizes, _ZERO)
    seen: dict[Fraction, tuple[int, int]] = {}
    while turn and left:
        before = min(left, -((pending - full) // turn) - 1)  # repetitions that close no bucket
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
