"""The rank for which numeric references of ops compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stagec.ir.core import Value
from stagec.ir.expr import Expr, evaluate
from stagec.ir.types import Dim

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NumericContext:
    """A rank: its coordinates on the mesh, sizes of symbols and axes, and the current iteration and
    microbatch.

    `zigzag` maps a dimension to the axes over which it is split in zigzag order.
    """

    env: Mapping[str, int]
    coords: Mapping[str, int]
    iteration: int = 0
    #: The split symbol, the number of the part, the number of parts.
    microbatch: tuple[str, int, int] | None = None
    zigzag: Mapping[str, Axes] = field(default_factory=dict[str, Axes])

    def size(self, value: Expr) -> int:
        """The number of a size."""
        return evaluate(value, self.env)

    def shape(self, value: Value) -> list[int]:
        """The local shape of a value."""
        return [self.size(n) for n in value.tensor.local_shape]

    def start(self, dim: Dim) -> int:
        """The global index of the first local element along a dimension."""
        return self.positions(dim)[0]

    def positions(self, dim: Dim) -> Sequence[int]:
        """The global index of each local element along a dimension."""
        batch, part, parts = self.microbatch or ("", 0, 1)
        parts = parts if batch in dim.size.symbols else 1
        positions: Sequence[int] = range(self.size(dim.size) * parts)
        order = self.zigzag.get(dim.size.symbol_name or "", ())
        axes = dim.axes
        while axes:
            folded = bool(order) and axes[: len(order)] == order
            over, axes = (order, axes[len(order) :]) if folded else (axes[:1], axes[1:])
            positions = self._part(positions, over, folded)
        return _piece(positions, part, parts) if parts > 1 else positions

    def _part(self, items: Sequence[int], over: Axes, folded: bool) -> Sequence[int]:
        """The part of a dimension on this rank: one piece, or two from both ends (zigzag)."""
        index, count = self._place(over)
        if not folded or count == 1:
            return _piece(items, index, count)
        front = _piece(items, index, 2 * count)
        return [*front, *_piece(items, 2 * count - 1 - index, 2 * count)]

    def _place(self, over: Axes) -> tuple[int, int]:
        """The number of this rank along these axes, and the number of ranks."""
        index, count = 0, 1
        for axis in over:
            index = index * self.env[axis] + self.coords.get(axis, 0)
            count *= self.env[axis]
        return index, count

    def moved(self, over: Axes, by: int) -> NumericContext:
        """The rank that is `by` places further along these axes, as a ring."""
        index, count = self._place(over)
        index = (index + by) % count
        coords = dict(self.coords)
        for axis in reversed(over):
            index, coords[axis] = divmod(index, self.env[axis])
        return replace(self, coords=coords)


def _piece(items: Sequence[int], index: int, count: int) -> Sequence[int]:
    length = len(items) // count
    return items[index * length : (index + 1) * length]
