"""Figures of a server over time, in bins that become wider as time goes on."""

from __future__ import annotations

from collections.abc import Sequence

#: The most bins of a series, and their first width in femtoseconds (a millisecond).
_BINS, _FIRST = 256, 10**12


class TimeSeries:
    """Integrals over time of several figures, in at most `_BINS` bins of one width. When time
    exceeds the last bin, pairs of bins are merged."""

    def __init__(self, figures: int) -> None:
        self.width = _FIRST
        self._bins = [[0] * _BINS for _ in range(figures)]

    def add(self, start: int, end: int, values: Sequence[int]) -> None:
        """The figures have these values from `start` to `end`, in femtoseconds."""
        while end > self.width * _BINS:
            self.width *= 2
            half = [0] * (_BINS // 2)
            self._bins = [[b[i] + b[i + 1] for i in range(0, _BINS, 2)] + half for b in self._bins]
        width = self.width
        first, last = start // width, (end - 1) // width
        for bins, value in zip(self._bins, values, strict=True):
            if not value:
                continue
            if first >= last:
                bins[first] += value * (end - start)
                continue
            bins[first] += value * ((first + 1) * width - start)
            for i in range(first + 1, last):
                bins[i] += value * width
            bins[last] += value * (end - last * width)

    @property
    def totals(self) -> list[int]:
        """The integral of each figure over all time."""
        return list(map(sum, self._bins))

    def widened(self, width: int) -> list[list[int]]:
        """The integrals in bins of this width, a multiple of its own."""
        step = width // self.width
        return [[sum(b[i : i + step]) for i in range(0, _BINS, step)] for b in self._bins]


def joined(series: Sequence[TimeSeries], end: int) -> tuple[int, list[list[float]]]:
    """The sum of several series: the width of bins in femtoseconds, and for each figure its mean in
    each bin up to `end`."""
    width = max(each.width for each in series)
    count = -(-end // width)
    widths = [width] * (count - 1) + [end - (count - 1) * width]
    bins = [each.widened(width) for each in series]
    return width, [
        [sum(values) / w for values, w in zip(zip(*rows, strict=True), widths, strict=False)]
        for rows in zip(*bins, strict=True)
    ]
