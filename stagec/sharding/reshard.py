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
    """One movement: an op and its parameters."""

    op: str
    over: Axes
    dim: int = 0
    source: int = 0
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
    steps += _exchanges(now, splits)
    steps += _gathers_and_slices(now, splits)
    return steps


def _common(a: Axes, b: Axes) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def _exchanges(now: list[Axes], splits: Sequence[Axes]) -> list[Step]:
    """Splits that move from the end of one dimension to the end of another, as many axes at a time
    as can be."""
    steps: list[Step] = []
    while (step := _exchange(now, splits)) is not None:
        keep = len(now[step.source]) - len(step.over)
        now[step.source], now[step.dim] = now[step.source][:keep], (*now[step.dim], *step.over)
        steps.append(step)
    return steps


def _exchange(now: Sequence[Axes], splits: Sequence[Axes]) -> Step | None:
    for d, target in enumerate(splits):
        missing = target[len(now[d]) :] if now[d] == target[: len(now[d])] else ()
        for count in range(len(missing), 0, -1):
            over = missing[:count]
            for source, axes in enumerate(now):
                keep = len(axes) - count
                ends = source != d and axes[max(keep, 0) :] == over
                if ends and _common(axes, splits[source]) <= keep:
                    return Step("stg.all_to_all", over, d, source)
    return None


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
