"""The memory of a rank class under a pipeline schedule: the plan of a graph, and the bytes of its
microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Env, Expr, UnboundError, const, evaluate, maximum, total
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir_spec.ops.pipeline import ACTIONS
from stagec.memory.step import (
    ActionInState,
    ActionRegion,
    Doing,
    MicrobatchState,
    after_work,
    first_run,
    first_runs,
    is_first_run,
    turns,
)
from stagec.memory.timeline import BUCKETS, CACHES, STATIC
from stagec.schedule.action import RankActions
from stagec.schedule.attached import actions_of
from stagec.support.diagnostics import DiagnosticError, error

#: The number of microbatches in each state, and the running works.
Turn = tuple[Mapping[MicrobatchState, int], tuple[ActionInState, ...]]

_AGAIN = "run 'plan-memory' again, which writes one for every action"


def staged_memory(
    module: Module, graph: Operation, planned: Mapping[str, Expr], stage: int
) -> Mapping[str, Expr]:
    """The plan of a graph, with stash and peak under the schedule of one stage.

    Without a schedule the plan is complete already. The peak is a `max` if sizes are open and no
    turn dominates.
    """
    stages = graph.attrs.get("stages")
    plans = [o for o in module.ops("stg.memory") if "around" in o.attrs]
    plan = next((o for o in plans if o.attrs.get("stages") == stages), None)
    if plan is None:
        return planned
    env = planned_env(module)
    ops = [o for o in module.ops("stg.working") if o.attrs.get("stages") == stages]
    works = _Works.of(ops, "left")
    order = actions_of(module, graph, stage)
    static = total(planned[n] for n in (*STATIC, CACHES, BUCKETS) if n in planned)
    running = static + plan.expr("around")
    doing = works.doing(order)
    peaks = [running + works.bytes(t) for t in works.worst(_turns(doing), env)]
    peaks = _largest([planned["peak"], *peaks], env)
    stash = [works.bytes(t) for t in works.worst(_stashes(doing), env)]
    hosted = _Works.of(ops, "host")
    doing = hosted.doing(order) if hosted.holds_any else []
    host = [hosted.bytes(t) for t in hosted.worst(_stashes(doing), env)] if doing else [ZERO]
    expressions = {**planned, "stash": maximum(stash), "peak": maximum(peaks)}
    return {**expressions, "host": planned.get("host", ZERO) + maximum(host)}


def turns_of(
    works: Iterable[ActionInState],
    residency: Mapping[MicrobatchState, bool],
    order: RankActions,
    *,
    hosted: bool = False,
) -> list[Turn]:
    """The distinct turns of a schedule of these works: they differ in the running works or in the
    states of microbatches, of which only those with `residency` count; with `hosted` they differ in
    the states after each turn."""
    each = _Works(
        dict.fromkeys(works, ZERO), {s: const(int(any_)) for s, any_ in residency.items()}
    )
    return each.unique((_stashes if hosted else _turns)(each.doing(order)))


def _turns(doing: Iterable[Doing]) -> Iterator[Turn]:
    for each in doing:
        yield each.states, tuple(w for w in each.works if w[0])


def _stashes(doing: Iterable[Doing]) -> Iterator[Turn]:
    for each in doing:
        for after in each.after():
            yield {s: n for s, n in after.items() if not any(map(is_first_run, s))}, ()


@dataclass(frozen=True, slots=True)
class _Works:
    """The peak of each work, and the bytes of a microbatch in each state."""

    peak: Mapping[ActionInState, Expr]
    held: Mapping[MicrobatchState, Expr]

    @staticmethod
    def of(ops: list[Operation], what: str) -> _Works:
        left: dict[ActionInState, Expr] = {}
        for op in ops:
            work = work_of(op)
            if work in left or len(first_runs(work)) != len(op.exprs("sums")):
                raise op.error(
                    "expected one stg.working for each action of a stage, with a size in 'sums' "
                    "for each of its 'first' runs",
                    remedy=_AGAIN,
                )
            left[work] = op.expr(what) if what in op.attrs else ZERO
        peak = {work_of(op): op.expr("peak") for op in ops}
        held: dict[MicrobatchState, Expr] = {MicrobatchState(): ZERO}
        for op in sorted(ops, key=lambda o: len(work_of(o)[1])):
            _, before = work = work_of(op)
            held[after_work(work)] = held.get(before, ZERO) + left[work]
            held.update(zip(first_runs(work), op.exprs("sums"), strict=True))
        return _Works(peak, held)

    @property
    def regions(self) -> frozenset[ActionRegion]:
        return frozenset(r for runs, _ in self.peak for r in runs if not is_first_run(r))

    @property
    def summed(self) -> frozenset[ActionRegion]:
        """The regions whose first run allocates sums of gradients."""
        firsts = frozenset(r for runs, _ in self.peak for r in runs)
        return frozenset(r for r in self.regions if first_run(r) in firsts)

    @property
    def holds_any(self) -> bool:
        """Whether a microbatch holds bytes in any state."""
        return any(size != ZERO for size in self.held.values())

    def holds(self, state: MicrobatchState) -> bool:
        """Whether a microbatch in this state holds bytes. Raises `DiagnosticError`."""
        if state not in self.held:
            raise _no_working("after", state)
        return self.held[state] != ZERO

    def doing(self, order: RankActions) -> list[Doing]:
        """The distinct turns of a schedule."""
        return list(turns(order, self.regions, self.summed, holds=self.holds))

    def bytes(self, turn: Turn) -> Expr:
        states, running = turn
        held = [self.held[s] * n for s, n in states.items()]
        return total([*held, *(self.peak[w] for w in running)])

    def unique(self, turns: Iterator[Turn]) -> list[Turn]:
        """The distinct turns. Raises `DiagnosticError` for works and states without bytes."""
        unique = {(frozenset(t[0].items()), t[1]): t for t in turns}
        for states, running in unique.values():
            for missing in [w for w in running if w not in self.peak]:
                raise _no_working("during", missing[0])
            for state in [s for s in states if s not in self.held]:
                raise _no_working("after", state)
        return [*unique.values()]

    def worst(self, turns: Iterator[Turn], env: Env) -> list[Turn]:
        """The turns that may have the peak: one, if all sizes are known."""
        unique = self.unique(turns)
        try:
            peak = {w: max(0, evaluate(e, env)) for w, e in self.peak.items()}
            held = {s: evaluate(e, env) for s, e in self.held.items()}
        except UnboundError:
            return _uncovered(unique)

        def bytes_at(turn: Turn) -> int:
            return sum(held[s] * n for s, n in turn[0].items()) + sum(peak[w] for w in turn[1])

        return [max(unique, key=bytes_at)]


def _no_working(when: str, regions: Iterable[ActionRegion]) -> DiagnosticError:
    names = " and ".join(f"{kind} of chunk {chunk}" for kind, chunk in sorted(regions))
    return error(
        f"no stg.working gives the memory of a microbatch {when} {names or 'nothing'}",
        remedy=_AGAIN,
    )


def work_of(op: Operation) -> ActionInState:
    """The actions of an `stg.working`, and the actions that ran before them."""
    chunk = op.integer("chunk")
    runs = ((kind, chunk) for kind in op.names("runs"))
    firsts = (first_run((kind, chunk)) for kind in op.names("first"))
    return (*runs, *firsts), frozenset(
        (kind, chunk) for kind in ACTIONS for chunk in op.integers(kind)
    )


def _largest(sizes: list[Expr], env: Env) -> list[Expr]:
    if all(e.symbols <= env.keys() for e in sizes):
        return [max(sizes, key=lambda e: evaluate(e, env))]
    return sizes


def _uncovered(turns: list[Turn]) -> list[Turn]:
    """The turns that no other turn with the same works covers."""
    front: list[Turn] = []
    for turn in turns:
        if any(_covers(other, turn) for other in front):
            continue
        front = [other for other in front if not _covers(turn, other)] + [turn]
    return front


def _covers(one: Turn, other: Turn) -> bool:
    return one[1] == other[1] and all(one[0].get(s, 0) >= n for s, n in other[0].items())
