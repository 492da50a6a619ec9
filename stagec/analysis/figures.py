"""What a job costs, in a few numbers, for any sizes that were compiled alike.

`Formulas` keeps what a lowered module says as expressions, and the moments of its memory plan as
rows of counts; `at` puts numbers in. The worst moment is found anew for each of them:

    moment             buffers alive, by size         bytes for B = 1     for B = 8
    forward, layer 0   1 x 2*B*S*D + 3 x 2*D*F        0.2 GB              0.3 GB
    backward, layer 0  4 x 2*B*S*D + 1 x 2*D*F        0.1 GB              0.6 GB
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from stagec.analysis.count import (
    FLOP_PHASES,
    Counts,
    copied,
    count_graph,
    group_size,
    lowered_graphs,
    ring_bytes,
)
from stagec.analysis.mean_loads import MeanLoads
from stagec.analysis.memory import turns_of, work_of
from stagec.ir.core import Operation
from stagec.ir.decisions import Decisions, Watched, plain
from stagec.ir.expr import ZERO, Env, Expr, evaluate, total
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.types import index_name
from stagec.memory.buffers import Buffer
from stagec.memory.lifetimes import lifetimes
from stagec.memory.step import ActionInState, MemoryRun, MicrobatchState, Planner
from stagec.memory.timeline import CACHES, STATIC
from stagec.memory.worst import on_device
from stagec.program.classes import index_axes
from stagec.schedule.attached import idle_share, stages_of

#: What is there for a time, as far as it is there at the peak.
OTHERS = "others"
Ints = npt.NDArray[np.int64]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """The most that any rank has of everything, in one training step.

    `flops` are executed, `sent` are bytes on a ring and in messages, `copied` bytes between host
    and device, `host` bytes in host memory. `memory` says what is held at the peak by the rank
    whose peak it is, in bytes, `by_stage` the same of each pipeline stage; `idle` is the share of
    the step in which the schedule leaves a rank without work, on a clock on which backward takes
    twice as long as forward.
    """

    ranks: int
    mesh: Mapping[str, int]
    parameters: int
    flops: int
    sent: int
    copied: int
    host: int
    idle: Fraction
    memory: Mapping[str, int]
    by_stage: Sequence[Mapping[str, int]] = ()

    @property
    def peak(self) -> int:
        """Bytes on the device at the worst moment."""
        return sum(self.memory.values())


class MemoryMoments:
    """The moments of the memory plans of a module, taken when its memory is planned."""

    def __init__(self, module: Module, decisions: Decisions) -> None:
        values = plain(planned_env(module))
        watched = Watched(values, decisions)
        works = module.ops("stg.working")
        self.loads = {n: v for n, v in values.items() if n not in module.env}
        self.of: dict[object, _Plan] = {}
        self.copied: list[Expr] = []
        for func in module.functions:
            planner = Planner(lifetimes(func.body, watched))
            mine = [op for op in works if op.attrs["stages"] == func.attrs.get("stages")]
            self.of[func.attrs.get("stages")] = _Plan(planner, mine)
            self.copied.append(copied(module, func))


class _Plan:
    """The moments of a function."""

    def __init__(self, planner: Planner, works: Sequence[Operation]) -> None:
        wanted = [b for b in planner.buffers if on_device(b)]
        self.sizes = list(dict.fromkeys(b.size for b in wanted))
        number = {size: i for i, size in enumerate(self.sizes)}
        slots = {b: number[b.size] for b in wanted}
        self.outside = _moments(planner.run(None), slots, len(number))
        runs = {work: planner.run(work) for work in map(work_of, works)}
        self.works = {work: _moments(run, slots, len(number)) for work, run in runs.items()}


def _moments(run: MemoryRun, slots: Mapping[Buffer, int], count: int) -> Ints:
    """How many buffers of each size live at each moment of a run that may be the worst, beside
    what was there at its start."""
    held = np.zeros(count, dtype=np.int64)
    rows: list[Ints] = []

    def add(buffers: Iterable[Buffer], sign: int) -> None:
        for buffer in buffers:
            if buffer in slots:
                held[slots[buffer]] += sign

    for step, ends in run:
        add(step.made, 1)
        if step.counts:
            rows.append(held.copy())
        add(ends, -1)
    return np.unique(np.array(rows, dtype=np.int64).reshape(-1, count), axis=0)


def _most(rows: Ints, sizes: Sequence[int]) -> int:
    """The largest sum of a row's counts times the sizes; 0 if there are none."""
    if not rows.size:
        return 0
    bound = int(np.abs(rows).sum(axis=1).max()) * max(map(abs, sizes), default=0)
    kind = np.int64 if bound < 1 << 62 else object
    return int((rows.astype(kind) @ np.array(sizes, dtype=kind)).max())


class FigureFormulas:
    """The figures of a lowered module for other values, as long as they are compiled alike."""

    def __init__(self, module: Module, plans: MemoryMoments) -> None:
        self._plans = plans
        mesh = module.mesh
        self._axes = mesh.axes if mesh else ()
        self._graphs = [_Graph(module, graph, plans) for graph in lowered_graphs(module)]
        graphs = module.graphs
        self._idle = max((idle_share(module, graph) for graph in graphs), default=Fraction(0))

    def at(self, values: Mapping[str, int]) -> Figures:
        """The figures for these values of all symbols and axes. Raises `NotAnIntegerError` for
        sizes that do not divide."""
        mesh = {a: values[a] for a in self._axes}
        planned = {**values, **self._plans.loads}
        memory = [m for graph in self._graphs for m in graph.memory(planned)]
        host, worst = max(h for h, _ in memory), max((m for _, m in memory), key=_total)
        counted = [c for graph in self._graphs for c in graph.counted(values)]
        return Figures(
            prod(mesh.values()),
            mesh,
            evaluate(self._graphs[0].counts.parameters, values),
            flops=max(flops for flops, _ in counted),
            sent=max(sent for _, sent in counted),
            copied=max(evaluate(e, planned) for e in self._plans.copied),
            host=host,
            idle=self._idle,
            memory=worst,
            by_stage=[m for _, m in memory],
        )


def _total(memory: Mapping[str, int]) -> int:
    return sum(memory.values())


class _Graph:
    """What the ranks that run a graph do and hold."""

    def __init__(self, module: Module, graph: Operation, plans: MemoryMoments) -> None:
        self._module, self._graph = module, graph
        self._means = MeanLoads(module, graph)
        self.counts: Counts = count_graph(module, graph, self._means.size)
        self._flops = total(self.counts.flops.get(p, ZERO) for p in FLOP_PHASES)
        stages = graph.attrs.get("stages")
        self._plan = plans.of[stages]
        planned = (o for o in module.ops("stg.memory") if o.attrs.get("stages") == stages)
        around = (o.expr("around") for o in planned if "around" in o.attrs)
        self._around = next(around, None)
        self._stages = stages_of(graph)
        self._indices = [a for a in index_axes(module, graph) if a != graph.text("over")]
        self._works = [o for o in module.ops("stg.working") if o.attrs.get("stages") == stages]

    # -- counts ------------------------------------------------------------------------------------

    def counted(self, values: Mapping[str, int]) -> list[tuple[int, int]]:
        """FLOPs and bytes sent of each of its classes."""
        found: list[tuple[int, int]] = []
        for coords in self._coordinates(values):
            inner = {index_name(a): coords[a] for a in self._indices}
            loads = self._means.values(coords)
            env: Env = {**values, **inner, **loads}
            found.append((evaluate(self._flops, env), self._sent(env)))
        return found

    def _coordinates(self, values: Mapping[str, int]) -> list[dict[str, int]]:
        """The coordinates of its classes; stages alone do not differ in what they do."""
        over = self._graph.text("over")
        found: list[dict[str, int]] = [{over: self._stages[0]} if self._stages else {}]
        if self._indices and self._stages:
            found = [{over: stage} for stage in self._stages]
        for axis in self._indices:
            found = [{**c, axis: i} for c in found for i in range(values[axis])]
        return found

    def _sent(self, env: Env) -> int:
        sent = 0
        for key, found in self.counts.collectives.items():
            members = evaluate(group_size(key.over), env)
            sent += ring_bytes(evaluate(found.bytes, env), members, key.op)
        messages = self.counts.messages.items()
        return sent + sum(evaluate(f.bytes, env) for key, f in messages if key.dir == "send")

    # -- memory ------------------------------------------------------------------------------------

    def memory(self, values: Values) -> list[tuple[int, Mapping[str, int]]]:
        """Bytes in host memory, and by category those at the peak, of each of its stages."""
        planned = self.counts.memory
        static = {n: evaluate(planned[n], values) for n in (*STATIC, CACHES) if n in planned}
        sizes = [evaluate(e, values) for e in self._plan.sizes]
        outside = _most(self._plan.outside, sizes)
        host = evaluate(planned.get("host", ZERO), values)
        if self._around is None:
            return [(host, {**static, OTHERS: outside})]
        around = evaluate(self._around, values)
        rises = [max(0, _most(self._plan.works[w], sizes)) for w in self._columns]
        held, hosted = (self._held(what, values) for what in ("left", "host"))
        found: list[tuple[int, Mapping[str, int]]] = []
        for turns, stashes in self._turns:
            others = max(outside, around + _most(turns, [*held, *rises]))
            found.append((host + _most(stashes, hosted), {**static, OTHERS: others}))
        return found

    @cached_property
    def _columns(self) -> list[ActionInState]:
        return [work_of(op) for op in self._works]

    @cached_property
    def _states(self) -> list[MicrobatchState]:
        after = (before | frozenset(runs) for runs, before in self._columns)
        return list(dict.fromkeys([MicrobatchState(), *after]))

    def _held(self, what: str, values: Values) -> list[int]:
        """What a microbatch holds in each state."""
        held = dict.fromkeys(self._states, 0)
        for op in sorted(self._works, key=lambda o: len(work_of(o)[1])):
            runs, before = work_of(op)
            more = evaluate(op.expr(what), values) if what in op.attrs else 0
            held[before | frozenset(runs)] = held.get(before, 0) + more
        return [held[s] for s in self._states]

    @cached_property
    def _turns(self) -> list[tuple[Ints, Ints]]:
        """For each stage: by turn how many microbatches are in each state and which works run; and
        how many are in each state after it."""
        found: list[tuple[Ints, Ints]] = []
        for stage in self._stages:
            turns = [
                [*self._counts(states), *(works.count(w) for w in self._columns)]
                for states, works in turns_of(self._module, self._graph, stage)
            ]
            after: list[list[int]] = []
            if any("host" in op.attrs for op in self._works):
                hosted = turns_of(self._module, self._graph, stage, "host")
                after = [self._counts(states) for states, _ in hosted]
            found.append((np.array(turns, dtype=np.int64), np.array(after, dtype=np.int64)))
        return found

    def _counts(self, states: Mapping[MicrobatchState, int]) -> list[int]:
        return [states.get(s, 0) for s in self._states]
