"""What every node of a trace adds to the memory of its rank, and gives back: the plan laid over the
program, operation by operation.

The plan is of functions, the program of the graphs that they were lowered to: `Plans` are taken in
between. Both run in the same order, so each operation finds its nodes by what they are and are
called. What an operation without a node makes counts at the next node, what it ends at the one
before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest

import numpy as np

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ZERO, Env, UnboundError, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir_spec.ops.comm import Collective, Shift
from stagec.ir_spec.ops.pipeline import SendOp
from stagec.memory.lifetimes import Buffer, Step, lifetimes
from stagec.memory.liveness import device_bytes
from stagec.memory.step import Planner, turns
from stagec.memory.timeline import DEVICE, Sized, Timeline
from stagec.schedule.action import RankActions
from stagec.schedule.attached import actions_of, stages_of
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, error
from stagec.trace.classes import RankClass
from stagec.trace.nodes import Events, Ints, Node, Program

#: The steps of an action, each with the buffers that end after it.
_Run = Sequence[tuple[Step, tuple[Buffer, ...]]]
#: What a node is, and the name of its value.
Label = tuple[str, str]


class Plans:
    """The plans of a module's functions, to be taken right after the pass `plan-memory`."""

    def __init__(self, module: Module) -> None:
        self._plans: dict[int, _Plan] = {}
        prefetch = read_strategy(module).prefetch
        for func in module.functions:
            plan = _plan(module, func, prefetch)
            self._plans.update(dict.fromkeys(stages_of(func) or (0,), plan))

    def annotate(self, each: RankClass, program: Program) -> Program:
        """The program of a class with the events of its nodes."""
        order = actions_of(each.module, each.graph, each.stage)
        plan = self._plans[each.stage]
        return replace(program, events=_Overlay(plan, program).events(plan.sections(order)))


def _plan(module: Module, func: Operation, prefetch: int) -> _Plan:
    try:
        env = planned_env(module)
        planner = Sized(lifetimes(func.body, env, prefetch, whole=True), env)
        static = Timeline(module, func, 0, planner).static(DEVICE)
        return _Plan(planner, func.body, env, sum(static.values()))
    except UnboundError as e:
        raise error(
            f"no value for {', '.join(e.names)}", func.loc, remedy=module.how_to_set(e.names)
        ) from None


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """Actions that run together (two of an overlapped pair), and what tells them from others."""

    key: Hashable
    runs: Sequence[_Run]


class _Plan:
    """What all stages that run a function share; every iteration of a repeat by itself."""

    def __init__(self, planner: Planner, body: Region, env: Env, static: int) -> None:
        self.static = static
        self._planner, self._env = planner, env
        self._sizes: dict[Value, int] = {}
        self._labels = {op: _labels(op) for op in body.walk()}
        self._cut = {op for op in body.walk() if "bucket" in op.attrs and _is_cut(op, env)}

    def sections(self, order: RankActions) -> Iterator[_Section]:
        """The step of a rank with this schedule, in order."""
        outside = self._planner.run(None)
        ends = [i for i, (s, _) in enumerate(outside) if s.op.definition.sums_yields]
        if not ends:
            yield _Section("all", [outside])
            return
        first, last = ends
        step = outside[first][0]
        yield _Section("before", [outside[: first + 1]])
        if self._planner.is_scheduled(step):
            for doing in turns(order, self._planner.regions):
                yield _Section(doing.works, [self._planner.run(w) for w in doing.works if w[0]])
        else:
            body = _Section("body", [outside[first + 1 : last]])
            yield from repeat(body, evaluate(step.op.expr("count"), self._env))
        yield _Section("after", [outside[last:]])

    def bytes(self, buffers: Sequence[Buffer]) -> int:
        """Their bytes in device memory."""
        return sum(self._size(b.value) for b in buffers)

    def _size(self, value: Value) -> int:
        if value not in self._sizes:
            self._sizes[value] = evaluate(device_bytes(value), self._env)
        return self._sizes[value]

    def labels(self, op: Operation) -> Sequence[Label]:
        """What its nodes are, if it has any."""
        return self._labels[op]

    def interleaved(self, runs: Sequence[_Run]) -> _Run:
        """The order in which actions run together: one goes on where another communicates."""
        queues = [list(self._between_calls(run)) for run in runs]
        return [step for turn in zip_longest(*queues, fillvalue=()) for q in turn for step in q]

    def _between_calls(self, run: _Run) -> Iterator[_Run]:
        start = 0
        for end, (step, _) in enumerate(run, 1):
            if self._is_call(step.op):
                yield run[start:end]
                start = end
        yield run[start:]

    def _is_call(self, op: Operation) -> bool:
        collective = isinstance(op.definition, Collective)
        return collective and not isinstance(op.definition, Shift) and op not in self._cut


def _is_cut(op: Operation, env: Env) -> bool:
    definition = op.definition
    whole = definition.buffer(op) if isinstance(definition, Collective) else ZERO
    return evaluate(whole, env) > evaluate(op.expr("bucket"), env)


def _labels(op: Operation) -> Sequence[Label]:
    values = op.results or op.operands
    if not values:
        return ()
    name, kind = values[0].name, op.name.partition(".")[2]
    if isinstance(op.definition, Shift):
        return ("send", f"{name}.send"), ("recv", name)
    return ((kind, f"{name}.send" if isinstance(op.definition, SendOp) else name),)


# -- the program -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Aligned:
    """A section as nodes: which they are, and their events."""

    labels: Ints
    events: Ints


class _Overlay:
    """Lays the sections of a plan over a program. The calls of a reduction that is cut into buckets
    stand elsewhere, and have no events."""

    def __init__(self, plan: _Plan, program: Program) -> None:
        self._plan, self._count = plan, len(program)
        numbers: dict[Label, int] = {}
        labels = map(_label, program.prototypes)
        numbered = [numbers.setdefault(label, len(numbers)) for label in labels]
        cut = np.array([_is_bucket(n) for n in program.prototypes], dtype=bool)
        self._places = np.flatnonzero(~cut[program.prototype])
        self._labels = np.array(numbered, dtype=np.int64)[program.prototype[self._places]]
        self._numbers = numbers
        self._known: dict[Hashable, _Aligned] = {}

    def events(self, sections: Iterator[_Section]) -> Events:
        """The events of all nodes. Raises `DiagnosticError` for nodes that were not planned."""
        found = np.zeros((2, self._count), dtype=np.int64)
        waiting = np.zeros((2, 0), dtype=np.int64)
        at = 0
        for section in sections:
            if section.key not in self._known:
                self._known[section.key] = self._aligned(section, at)
            known = self._known[section.key]
            count = len(known.labels)
            if not np.array_equal(self._labels[at : at + count], known.labels):
                raise _other_than_planned(f"a node from {self._places[at] + 1} on is another one")
            if not count:
                waiting = np.concatenate([waiting, known.events], axis=1)
                continue
            places = self._places[at : at + count]
            found[:, places] = known.events
            found[:, places[0]] = _as_one(
                np.insert(waiting, waiting.shape[1], found[:, places[0]], axis=1)
            )
            waiting, at = waiting[:, :0], at + count
        if at < len(self._places):
            raise _other_than_planned(f"node {self._places[at] + 1} is not in it")
        if waiting.size:
            last = found[:, self._places[-1]]
            found[:, self._places[-1]] = _as_one(np.insert(waiting, 0, last, axis=1))
        return Events(self._plan.static, found[0], found[1])

    def _aligned(self, section: _Section, at: int) -> _Aligned:
        """The nodes of a section that starts at the `at`th: a step has those that are called as it
        is, or none."""
        steps: list[tuple[int, int]] = []
        starts: list[int] = []
        labels: list[int] = []
        begun: int | None = None  # the first step that belongs to the next node
        for step, ends in self._plan.interleaved(section.runs):
            mine = self._nodes(step.op, at + len(labels))
            for _ in mine[1:]:
                starts.append(len(steps) if begun is None else begun)
                steps.append((0, 0))
                begun = None
            event = self._plan.bytes(step.made), self._plan.bytes(ends)
            if mine:
                starts.append(len(steps) if begun is None else begun)
                begun = None
            elif event[0] and begun is None:
                begun = len(steps)
            steps.append(event)
            labels += mine
        if starts:
            starts[0] = 0
        alone = np.array(steps, dtype=np.int64).reshape(-1, 2).T
        merged = _merged(alone, starts) if starts else alone
        return _Aligned(np.array(labels, dtype=np.int64), merged)

    def _nodes(self, op: Operation, at: int) -> list[int]:
        wanted = [self._numbers.get(label, -1) for label in self._plan.labels(op)]
        found: list[int] = self._labels[at : at + len(wanted)].tolist()
        return found if found == wanted else []


def _other_than_planned(what: str) -> DiagnosticError:
    return error(
        f"--memory-events: the trace does not follow the memory plan: {what}",
        remedy="put plan-memory right before lower-to-trace in --pipeline",
    )


def _merged(events: Ints, starts: Sequence[int]) -> Ints:
    found = Events(0, events[0], events[1]).merged(np.array(starts, dtype=np.int64))
    return np.stack([found.alloc, found.free])


def _as_one(events: Ints) -> Ints:
    return _merged(events, [0])[:, 0]


def _label(node: Node) -> Label:
    return node.kind, node.name.rpartition("/")[2]


def _is_bucket(node: Node) -> bool:
    """Names of values have no dot."""
    return node.is_collective and "." in node.name
