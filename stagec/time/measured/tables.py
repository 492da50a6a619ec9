"""Tables of measured kernels, and the look-up of kernels in them.

The table is chosen by kind, type and mask; in it a kernel is matched exactly, interpolated between
measured neighbours, or not found.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.program.kernels import Kernel

#: Places along an axis.
Places: TypeAlias = NDArray[np.intp]
#: The result of a look-up.
MATCHED, INTERPOLATED, NOT_FOUND = 0, 1, 2
#: Neighbours for interpolation are at most this factor apart in each extent.
_FURTHEST = 4.0
_FARTHEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Table:
    """Measured kernels of one kind, type and mask: `extents` has a row of whole numbers for each,
    `seconds` their times, `source` who measured.

    Extents are those of the kind (`stagec.program.kernels.EXTENTS`), the bytes for `memory`, ranks
    and bytes of the whole buffer for collectives. `op` distinguishes kernels of `memory`; a table
    without an op serves all of them.
    """

    kind: str
    dtype: str
    causal: bool
    extents: NDArray[np.int64]
    seconds: NDArray[np.float64]
    source: str
    op: str = ""


def consensus(tables: Iterable[Table]) -> list[Table]:
    """One table for each kind, type, mask and op, with the median of all times of each kernel."""
    together: dict[tuple[str, str, bool, str], list[Table]] = defaultdict(list)
    for table in tables:
        together[table.kind, table.dtype, table.causal, table.op].append(table)
    return [_median(some) for some in together.values()]


def _median(tables: Sequence[Table]) -> Table:
    every = np.concatenate([t.extents for t in tables])
    rows, inverse = np.unique(every, axis=0, return_inverse=True)
    which, seconds = inverse.ravel(), np.concatenate([t.seconds for t in tables])
    order = np.lexsort((seconds, which))
    seconds, count = seconds[order], np.bincount(which)
    first = np.cumsum(count) - count
    middle = (seconds[first + (count - 1) // 2] + seconds[first + count // 2]) / 2
    source = "+".join(dict.fromkeys(t.source for t in tables))
    one = tables[0]
    return Table(one.kind, one.dtype, one.causal, rows, middle, source, one.op)


class Measured:
    """Measured kernels of a device, looked up by kind, type, mask, op and extents."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._grids: dict[tuple[str, str, bool, str, int], _Grid] = {}
        for table in consensus(tables):
            key = (table.kind, table.dtype, table.causal, table.op, table.extents.shape[1])
            self._grids[key] = _Grid(table)

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._grids)

    def seconds(self, kernels: Sequence[Kernel]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
        """Seconds of each kernel, and how each was looked up: `MATCHED`, `INTERPOLATED`, or
        `NOT_FOUND`, with NaN for the seconds.

        A product that was not measured takes the time of the transposed product, if that was.
        Frameworks compute the gradients of weights that way.
        """
        seconds, ways = self._seconds(kernels)
        missed = [i for i, k in enumerate(kernels) if k.kind == "matmul" and ways[i] != MATCHED]
        if missed and self._grids:
            turned, how = self._seconds([_transposed(kernels[i]) for i in missed])
            better = how == MATCHED
            chosen = np.array(missed)[better]
            seconds[chosen], ways[chosen] = turned[better], how[better]
        return seconds, ways

    def _seconds(self, kernels: Sequence[Kernel]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
        seconds = np.full(len(kernels), np.nan)
        ways = np.full(len(kernels), NOT_FOUND, dtype=np.int8)
        together: dict[tuple[str, str, bool, str, int], list[int]] = defaultdict(list)
        for i, k in enumerate(kernels if self._grids else ()):
            for op in dict.fromkeys((k.op, "")):
                key = (k.kind, k.dtype, k.causal, op, len(_extents(k)))
                if key in self._grids and not k.windowed:
                    together[key].append(i)
                    break
        for key, indices in together.items():
            rows = np.array([_extents(kernels[i]) for i in indices], dtype=np.int64)
            seconds[indices], ways[indices] = self._grids[key].seconds(rows)
        return seconds, ways


def _transposed(kernel: Kernel) -> Kernel:
    *batch, m, n, k = kernel.extents
    return kernel._replace(extents=(*batch, n, m, k))


def _extents(kernel: Kernel) -> tuple[int, ...]:
    """The extents of a kernel, with the largest 64-bit integer in place of larger ones."""
    extents = (kernel.bytes,) if kernel.kind == "memory" else kernel.extents
    return tuple(min(extent, _FARTHEST) for extent in extents)


class _Grid:
    """A table as points of a grid, not all of which need have a time.

    Two extents that are equal to each other in all rows, such as queries and keys of a prefill, are
    one axis.
    """

    def __init__(self, table: Table) -> None:
        columns = table.extents.T
        self._twin = [
            next(i for i in range(j + 1) if np.array_equal(columns[i], columns[j]))
            for j in range(len(columns))
        ]
        self._axes = [j for j, twin in enumerate(self._twin) if twin == j]
        self._values = [np.unique(columns[j]) for j in self._axes]
        points = self._points(self._places(table.extents.T))
        order = np.argsort(points)
        self._known = points[order]
        self._logs = np.log(table.seconds[order])

    def seconds(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
        """Seconds of kernels by their extents, and how each was looked up."""
        possible = (rows > 0).all(axis=1) & (rows == rows[:, self._twin]).all(axis=1)
        below: list[Places] = []
        above: list[Places] = []
        weight: list[NDArray[np.float64]] = []
        for values, axis in zip(self._values, self._axes, strict=True):
            wanted = rows[:, axis]
            last = len(values) - 1
            low: Places = np.clip(np.searchsorted(values, wanted, side="right") - 1, 0, last)
            high: Places = np.clip(np.searchsorted(values, wanted), 0, last)
            inside = (values[low] <= wanted) & (wanted <= values[high])
            possible &= inside & (values[high] <= _FURTHEST * values[low])
            span = np.log(np.maximum(values[high] / values[low], 1))
            at = np.log(np.maximum(wanted, 1) / values[low])
            below.append(low)
            above.append(high)
            weight.append(np.divide(at, span, out=np.zeros(len(rows)), where=span > 0))
        total = np.zeros(len(rows))
        for corner in product((False, True), repeat=len(self._axes)):
            share = np.ones(len(rows))
            for upper, w in zip(corner, weight, strict=True):
                share = share * (w if upper else 1 - w)
            needed = share > 0
            at_corner = [
                a if upper else b for upper, a, b in zip(corner, above, below, strict=True)
            ]
            logs, there = self._at(self._points(np.stack(at_corner)))
            total += np.where(needed, share * logs, 0)
            possible &= there | ~needed
        exact = np.all([low == high for low, high in zip(below, above, strict=True)], axis=0)
        ways = np.where(exact, MATCHED, INTERPOLATED)
        return (
            np.where(possible, np.exp(total), np.nan),
            np.where(possible, ways, NOT_FOUND).astype(np.int8),
        )

    def _places(self, columns: NDArray[np.int64]) -> Places:
        """The place on each axis of rows that are in the table."""
        result = np.zeros((len(self._axes), columns.shape[1]), dtype=np.intp)
        for i, (values, axis) in enumerate(zip(self._values, self._axes, strict=True)):
            result[i] = np.searchsorted(values, columns[axis])
        return result

    def _points(self, places: Places) -> NDArray[np.int64]:
        """One number for each point, from its place on each axis."""
        points = np.zeros(places.shape[1], dtype=np.int64)
        for place, values in zip(places, self._values, strict=True):
            points = points * len(values) + place
        return points

    def _at(self, points: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Logarithms of seconds at points, and whether they are known."""
        place = np.clip(np.searchsorted(self._known, points), 0, len(self._known) - 1)
        there = self._known[place] == points
        return np.where(there, self._logs[place], 0.0), there
