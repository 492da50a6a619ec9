"""How to get from one placement to another: a list of collectives, cheapest first.

`plan` works on types only. Per axis: partial to split is a reduce_scatter, partial to replicated an
all_reduce, split to split an all_to_all, split to replicated an all_gather, replicated to split a
slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.ir.types import TensorType

Axes = tuple[str, ...]


class NoPlanError(ValueError):
    """The target cannot be reached: something would have to become partial."""


@dataclass(frozen=True, slots=True)
class Step:
    """One movement: an op and its parameters.

    An all_to_all that moves axes between different dimensions has a `dim` and `source` for each.
    """

    op: str
    over: Axes
    dim: int | tuple[int, ...] = 0
    source: int | tuple[int, ...] = 0
    kind: str = "sum"


def plan(have: TensorType, splits: Sequence[Axes], partial: Axes = ()) -> list[Step]:
    """The steps from `have` to a value split over `splits` and partial over `partial`.

    Reductions that scatter come first (they shrink what follows), then reductions, exchanges,
    slices and gathers. Axes that move together move in one step. Raises `NoPlanError`.
    """
    now = [d.axes for d in have.dims]
    waiting = have.partial_axes
    if not set(partial) <= set(waiting):
        raise NoPlanError(
            f"cannot make {have} partial over {', '.join(set(partial) - set(waiting))}"
        )
    kind = have.partial.kind if have.partial else "sum"
    steps: list[Step] = []
    pending = tuple(a for a in waiting if a not in partial)
    if kind == "sum":
        for d, target in enumerate(splits):
            over = target[len(now[d]) :]
            if over and now[d] == target[: len(now[d])] and set(over) <= set(pending):
                steps.append(Step("stg.reduce_scatter", over, d))
                now[d] = target
                pending = tuple(a for a in pending if a not in over)
    if pending:
        steps.append(Step("stg.all_reduce", pending, kind=kind))
    steps += _together(_exchanges(now, splits))
    steps += _gathers_and_slices(now, splits)
    return steps


def _common(a: Axes, b: Axes) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


_Move = tuple[Axes, int, int]


def _exchanges(now: list[Axes], splits: Sequence[Axes]) -> list[_Move]:
    """Splits that move from the end of one dimension to the end of another: axes, from, to; as many
    axes at a time as can be."""
    moves: list[_Move] = []
    while (move := _exchange(now, splits)) is not None:
        over, source, d = move
        now[source], now[d] = now[source][: len(now[source]) - len(over)], (*now[d], *over)
        moves.append(move)
    return moves


def _exchange(now: Sequence[Axes], splits: Sequence[Axes]) -> _Move | None:
    for d, target in enumerate(splits):
        missing = target[len(now[d]) :] if now[d] == target[: len(now[d])] else ()
        for count in range(len(missing), 0, -1):
            over = missing[:count]
            for source, axes in enumerate(now):
                keep = len(axes) - count
                ends = source != d and axes[max(keep, 0) :] == over
                if ends and _common(axes, splits[source]) <= keep:
                    return over, source, d
    return None


def _together(moves: list[_Move]) -> list[Step]:
    """One call for exchanges that come from one dimension, or go to one; else one for each."""
    sources, dims = ({m[i] for m in moves} for i in (1, 2))
    if len(moves) < 2 or sorted((len(sources), len(dims))) != [1, len(moves)]:
        return [Step("stg.all_to_all", over, d, source) for over, source, d in moves]
    ordered = moves if len(dims) == 1 else moves[::-1]  # the axes of a dimension, major first
    axes = [(axis, source, d) for over, source, d in ordered for axis in over]
    over, froms, tos = zip(*axes, strict=True)
    return [Step("stg.all_to_all", over, tos, froms)]


def _gathers_and_slices(now: list[Axes], splits: Sequence[Axes]) -> list[Step]:
    gathers: list[Step] = []
    slices: list[Step] = []
    for d, target in enumerate(splits):
        keep = _common(now[d], target)
        if now[d][keep:]:
            gathers.append(Step("stg.all_gather", now[d][keep:], d))
        if target[keep:]:
            slices.append(Step("stg.slice", target[keep:], d))
    busy = {a for g in gathers for a in g.over}
    early = [s for s in slices if not set(s.over) & busy and all(g.dim != s.dim for g in gathers)]
    late = [s for s in slices if s not in early]
    return early + gathers + late
