"""Memory of a rank class under a pipeline schedule: its stashes in flight on top of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr, maximum, total
from stagec.ir.module import Module
from stagec.schedule.action import RankActions
from stagec.trace.classes import actions_of


def staged_memory(
    module: Module, graph: Operation, planned: Mapping[str, Expr], stage: int
) -> Mapping[str, Expr]:
    """The plan of a graph with stash and peak as the schedule makes them on one stage.

    Without a schedule the plan is whole already. With one, the plan says what a microbatch keeps on
    each chunk; the stash is the most that is kept at once, and the peak adds everything else.
    """
    plans = [o for o in module.ops("stg.memory") if "chunks" in o.attrs]
    plan = next((o for o in plans if o.attrs.get("stages") == graph.attrs.get("stages")), None)
    if plan is None:
        return planned
    sizes = plan.attrs["chunks"]
    each = [s for s in (sizes if isinstance(sizes, tuple) else (sizes,)) if isinstance(s, Expr)]
    stash = _most_held(actions_of(module, graph)[stage], each)
    static = total(planned[n] for n in ("parameters", "gradients", "optimizer"))
    return {**planned, "stash": stash, "peak": static + stash + planned["transient"]}


def _most_held(order: RankActions, each: list[Expr]) -> Expr:
    """The most bytes stashed at once; a `max` where chunks of open sizes compete."""
    held = [0] * len(each)
    seen: dict[tuple[int, ...], None] = {}
    for action in order:
        if action.kind == "F":
            held[action.chunk] += 1
            seen[tuple(held)] = None
        elif action.kind == "W" or not action.split:
            held[action.chunk] -= 1
    worst = [s for s in seen if not any(_covers(other, s) for other in seen if other != s)]
    return maximum(
        [total(size * n for size, n in zip(each, s, strict=True)) for s in worst] or [ZERO]
    )


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
