"""Memory of a rank class under a pipeline schedule: its stashes in flight on top of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr, maximum, total
from stagec.ir.module import Module
from stagec.schedule.action import RankActions
from stagec.schedule.attached import actions_of


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
    each, handed = _sizes(plan, "chunks"), _sizes(plan, "handed")
    stash = _most_held(actions_of(module, graph, stage), each, handed or [ZERO] * len(each))
    static = total(planned[n] for n in ("parameters", "gradients", "optimizer"))
    return {**planned, "stash": stash, "peak": static + stash + planned["transient"]}


def _sizes(plan: Operation, name: str) -> list[Expr]:
    sizes = plan.attrs.get(name, ())
    return [s for s in (sizes if isinstance(sizes, tuple) else (sizes,)) if isinstance(s, Expr)]


def _most_held(order: RankActions, each: list[Expr], handed: list[Expr]) -> Expr:
    """The most bytes stashed at once; a `max` where chunks of open sizes compete.

    `each` is kept on a chunk from F to B (or W, where that is split out), `handed` from B to W.
    """
    chunks = len(each)
    held = [0] * (2 * chunks)
    seen: dict[tuple[int, ...], None] = {}
    for action in order:
        if action.kind == "F":
            held[action.chunk] += 1
        elif action.kind == "B" and action.split:
            held[chunks + action.chunk] += 1
        else:
            held[action.chunk] -= 1
            held[chunks + action.chunk] -= action.kind == "W"
        seen[tuple(held)] = None
    worst = [s for s in seen if not any(_covers(other, s) for other in seen if other != s)]
    sizes = [*each, *handed]
    sums = [total(size * n for size, n in zip(sizes, s, strict=True)) for s in worst]
    return maximum(sums or [ZERO])


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
