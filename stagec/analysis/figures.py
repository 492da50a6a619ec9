"""The main figures of a job, for all sizes that share a compile.

`FigureFormulas` has the counts of a lowered module as expressions, and the moments of its memory
plan as rows of counts; `at` evaluates them. The peak is found for each set of values:

    moment             buffers alive, by size         bytes for B = 1     for B = 8
    forward, layer 0   1 x 2*B*S*D + 3 x 2*D*F        0.2 GB              0.3 GB
    backward, layer 0  4 x 2*B*S*D + 1 x 2*D*F        0.1 GB              0.6 GB
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from stagec.analysis.count import (
    FLOP_PHASES,
    Counts,
    count_graph,
    group_size,
    lowered_graphs,
    ring_bytes,
)
from stagec.analysis.mean_loads import MeanLoads
from stagec.analysis.memory import turns_of
from stagec.analysis.memory_moments import Ints, MemoryMoments, by_category, most, sums_of, worst
from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Env, Expr, evaluate, total
from stagec.ir.module import Module
from stagec.ir.types import index_name
from stagec.memory.buffers import CATEGORIES
from stagec.memory.step import MicrobatchState
from stagec.memory.timeline import BUCKETS, CACHES, STATIC
from stagec.program.classes import index_axes
from stagec.schedule.attached import actions_of, idle_share, stages_of

#: The category of buffers that do not exist for the whole step, at the peak.
OTHERS = "others"
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """The memory of ranks in a step.

    `host` is the largest number of bytes in host memory. `memory` has the bytes at the peak of the
    fullest rank, `by_stage` those of each pipeline stage, and `categories` divides them into the
    categories of `stagec memory`. `pods` are the figures of several pods by name; the axes of the
    mesh are then prefixed, as in `main/tp`.
    """

    mesh: Mapping[str, int]
    host: int
    memory: Mapping[str, int]
    categories: Mapping[str, int]
    by_stage: Sequence[Mapping[str, int]] = ()
    pods: Mapping[str, MemoryFigures] = field(default_factory=dict[str, "MemoryFigures"])

    @property
    def peak(self) -> int:
        """The bytes on the device at the peak."""
        return sum(self.memory.values())

    @property
    def each(self) -> Sequence[MemoryFigures]:
        """The figures of each pod; for one pod these figures."""
        return [*self.pods.values()] or [self]

    def missing(self, room: Callable[[Mapping[str, int]], int]) -> int:
        """The largest number of bytes by which the peak of a pod exceeds the room of its mesh;
        negative if all fit."""
        return max(f.peak - room(f.mesh) for f in self.each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(MemoryFigures):
    """The largest figures of any rank in a step.

    `flops` are executed FLOPs, `sent` bytes in collectives (as rings) and messages, and `copied`
    bytes between host and device. `idle` is the share of the step in which the schedule leaves a
    rank without work, if backward takes twice as long as forward.
    """

    ranks: int
    parameters: int
    flops: int
    sent: int
    copied: int
    idle: Fraction


def joined_figures(pods: Mapping[str, Figures], twice: Collection[str] = ()) -> Figures:
    """The figures of a job of these pods: the ranks of all, the largest figures of any rank, and
    the memory of the fullest pod. The parameters of the pods `twice` are not counted, since another
    pod has the same model."""
    if len(pods) == 1:
        return next(iter(pods.values()))
    each = pods.values()
    fullest = max(each, key=lambda f: f.peak)
    return replace(
        fullest,
        ranks=sum(f.ranks for f in each),
        mesh={f"{pod}/{axis}": n for pod, f in pods.items() for axis, n in f.mesh.items()},
        parameters=sum(f.parameters for pod, f in pods.items() if pod not in twice),
        flops=max(f.flops for f in each),
        sent=max(f.sent for f in each),
        copied=max(f.copied for f in each),
        host=max(f.host for f in each),
        idle=max(f.idle for f in each),
        pods=pods,
    )


class FigureFormulas:
    """The figures of a lowered module, for all values that share its compile."""

    def __init__(self, module: Module, plans: MemoryMoments) -> None:
        self._module, self._plans = module, plans
        mesh = module.mesh
        self._axes = mesh.axes if mesh else ()

    @cached_property
    def _graphs(self) -> list[_Graph]:
        return [_Graph(self._module, g, self._plans) for g in lowered_graphs(self._module)]

    @cached_property
    def _idle(self) -> Fraction:
        return max(idle_share(self._module, graph) for graph in self._module.graphs)

    def at(self, values: Mapping[str, int]) -> Figures:
        """The figures for these values of all symbols and axes. Raises `NotAnIntegerError` for
        sizes that do not divide."""
        memory, planned = self.memory_figures(values), {**values, **self._plans.loads}
        counted = [c for graph in self._graphs for c in graph.counted(values)]
        return Figures(
            mesh=memory.mesh,
            host=memory.host,
            memory=memory.memory,
            categories=memory.categories,
            by_stage=memory.by_stage,
            ranks=prod(memory.mesh.values()),
            parameters=evaluate(self._graphs[0].counts.parameters, values),
            flops=max(flops for flops, _ in counted),
            sent=max(sent for _, sent in counted),
            copied=max(evaluate(e, planned) for e in self._plans.copied),
            idle=self._idle,
        )

    def memory_figures(self, values: Mapping[str, int]) -> MemoryFigures:
        """The memory of these figures. Raises `NotAnIntegerError`."""
        planned = {**values, **self._plans.loads}
        memory = [m for graph in self._graphs for m in graph.memory(planned)]
        fullest = max(memory, key=lambda each: sum(each.memory.values()))
        return MemoryFigures(
            mesh={a: values[a] for a in self._axes},
            host=max(each.host for each in memory),
            memory=fullest.memory,
            categories=fullest.categories(),
            by_stage=[each.memory for each in memory],
        )


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """The bytes of a rank of a stage at its peak; `host` is the largest number in host memory."""

    host: int
    memory: Mapping[str, int]
    categories: Callable[[], Mapping[str, int]]


class _Graph:
    """The counts and the memory of the ranks that run a graph."""

    def __init__(self, module: Module, graph: Operation, plans: MemoryMoments) -> None:
        self._module, self._graph = module, graph
        self._means = MeanLoads(module, graph)
        self._plan = plans.of[graph.attrs.get("stages")]
        self._stages = stages_of(graph)
        self._indices = [a for a in index_axes(module, graph) if a != graph.text("over")]

    # -- counts ------------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> Counts:
        """The counts of a rank."""
        return count_graph(self._module, self._graph, self._means.size)

    @cached_property
    def _flops(self) -> Expr:
        return total(self.counts.flops.get(p, ZERO) for p in FLOP_PHASES)

    def counted(self, values: Mapping[str, int]) -> list[tuple[int, int]]:
        """The FLOPs and sent bytes of each class."""
        pairs: list[tuple[int, int]] = []
        for coords in self._coordinates(values):
            inner = {index_name(a): coords[a] for a in self._indices}
            loads = self._means.values(coords)
            env: Env = {**values, **inner, **loads}
            pairs.append((evaluate(self._flops, env), self._sent(env)))
        return pairs

    def _coordinates(self, values: Mapping[str, int]) -> list[dict[str, int]]:
        """The coordinates of the classes; stages with the same graph count once unless other
        indices differ."""
        over = self._graph.text("over")
        coordinates: list[dict[str, int]] = [{over: self._stages[0]} if self._stages else {}]
        if self._indices and self._stages:
            coordinates = [{over: stage} for stage in self._stages]
        for axis in self._indices:
            coordinates = [{**c, axis: i} for c in coordinates for i in range(values[axis])]
        return coordinates

    def _sent(self, env: Env) -> int:
        sent = 0
        for key, collective in self.counts.collectives.items():
            members = evaluate(group_size(key.over), env)
            sent += ring_bytes(evaluate(collective.bytes, env), members, key.op)
        messages = self.counts.messages.items()
        return sent + sum(evaluate(f.bytes, env) for key, f in messages if key.dir == "send")

    # -- memory ------------------------------------------------------------------------------------

    def memory(self, values: Values) -> list[_StageMemory]:
        """The memory of each stage."""
        planned = self._plan.parts
        static = {n: evaluate(planned[n], values) for n in (*STATIC, CACHES) if n in planned}
        sizes = self._plan.bytes_of(values)
        outside, row = worst(self._plan.outside, sizes)
        host = evaluate(self._plan.host, values)
        buckets = {n: evaluate(planned[n], values) for n in (BUCKETS,) if n in planned}

        def stage(host: int, others: int, counts: Callable[[], Ints]) -> _StageMemory:
            def categories() -> Mapping[str, int]:
                live = Counter(by_category(counts(), self._plan.categories, sizes))
                live["communication"] += sum(buckets.values())
                return {**static, **{c: live[c] for c in CATEGORIES}}

            return _StageMemory(host, {**static, **buckets, OTHERS: others}, categories)

        def alone() -> Ints:
            counts: Ints = self._plan.outside[row]
            return counts

        if (fixed := self._plan.around) is None:
            return [stage(host, outside, alone)]
        around, kept = most(fixed[None], sizes), np.array([*self._plan.held.values()])
        rises = [worst(rows, sizes) for rows in self._plan.works.values()]
        live = sums_of(kept, sizes).tolist()
        hosted = [evaluate(size, values) for size in self._plan.hosted.values()]
        figures: list[_StageMemory] = []
        for turns, stashes in self._turns:
            more, turn = worst(turns, [*live, *(max(0, rise) for rise, _ in rises)])
            counts = partial(self._at_turn, fixed, turns[turn], rises) if len(turns) else alone
            if around + more < outside:
                counts = alone
            host_bytes = host + most(stashes, hosted)
            figures.append(stage(host_bytes, max(outside, around + more), counts))
        return figures

    def _at_turn(self, live: Ints, turn: Ints, rises: Sequence[tuple[int, int]]) -> Ints:
        """The number of live buffers of each kind at the peak of a turn, including `live`, which
        exist during all turns."""
        states = np.array([*self._plan.held.values()], dtype=np.int64)
        live = live + turn[: len(states)] @ states
        running = zip(turn[len(states) :], self._plan.works.values(), rises, strict=True)
        for number, rows, (rise, row) in running:
            if number and rise > 0:
                live = live + number * rows[row]
        return live

    @cached_property
    def _turns(self) -> list[tuple[Ints, Ints]]:
        """For each stage, by turn: the number of microbatches in each state and the running works,
        and the number in each state after the turn."""
        pairs: list[tuple[Ints, Ints]] = []
        works, hosts = self._plan.works, any(size != ZERO for size in self._plan.hosted.values())
        for stage in self._stages:
            order = actions_of(self._module, self._graph, stage)
            turns = [
                [*self._counts(states), *(running.count(w) for w in works)]
                for states, running in turns_of(works, self._plan.residency(), order)
            ]
            after: list[list[int]] = []
            if hosts:
                hosted = turns_of(works, self._plan.residency(hosted=True), order, hosted=True)
                after = [self._counts(states) for states, _ in hosted]
            pairs.append((np.array(turns, dtype=np.int64), np.array(after, dtype=np.int64)))
        return pairs

    def _counts(self, states: Mapping[MicrobatchState, int]) -> list[int]:
        return [states.get(s, 0) for s in self._plan.held]
