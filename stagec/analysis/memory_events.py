"""The bytes that every node of a trace allocates and frees, from the memory plan.

Plans belong to functions, and programs to the graphs to which these are lowered; `EventPlans` are
taken in between. Both have the same order, and each node refers to its original operation.
Allocations of an operation without a node count at the next node, and frees at the previous one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest

import numpy as np

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import Env, UnboundError, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.opdef import OpDef
from stagec.ir.traits import Accumulates
from stagec.ir_spec.ops.comm import Collective, CollectivePermute
from stagec.ir_spec.ops.pipeline import RecvOp, SendOp
from stagec.memory.buffers import Buffer, RunOp
from stagec.memory.iterations import is_ahead
from stagec.memory.liveness import device_bytes
from stagec.memory.step import MemoryRun, MicrobatchState, Planner, turns
from stagec.memory.timeline import DEVICE, MemoryTimeline
from stagec.program.classes import RankClass
from stagec.program.columns import cache_splits
from stagec.program.nodes import Events, Ints, Node, Program
from stagec.program.stepper import Order
from stagec.schedule.attached import actions_of, receives_of, regions_of, stages_of
from stagec.support.diagnostics import DiagnosticError, error


class EventPlans:
    """The plans of the functions of a module, to be created right after the pass `plan-memory`."""

    def __init__(self, module: Module) -> None:
        self._plans: dict[int, _Plan] = {}
        for func in module.functions:
            plan = _plan(module, func)
            self._plans.update(dict.fromkeys(stages_of(func) or (0,), plan))

    def annotate(self, each: RankClass, program: Program) -> Program:
        """The program of a class with the events of its nodes."""
        where = each.module, each.graph, each.stage
        order = Order(actions_of(*where), receives_of(*where))
        plan = self._plans[each.stage]
        try:
            events = _Overlay(plan, program).events(plan.sections(order))
        except DiagnosticError:  # gathers of parameters that the plan has earlier or later
            events = _Overlay(plan, program, gathers=False).events(plan.sections(order))
        return replace(program, events=events)


def _plan(module: Module, func: Operation) -> _Plan:
    try:
        env = planned_env(module)
        planner = MemoryTimeline.planner(module, func, whole=True)
        return _Plan(planner, env, sum(planner.static(DEVICE).values()))
    except UnboundError as e:
        raise module.no_value(e.names, func.loc) from None


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """Actions that run together (two of an overlapped pair), and a key that is equal for equal
    sections."""

    key: Hashable
    runs: Sequence[MemoryRun]


class _Plan:
    """The plan that all stages of a function share, with separate iterations of repeats."""

    def __init__(self, planner: Planner, env: Env, static: int) -> None:
        self.static = static
        self._planner, self._env = planner, env
        self._sizes: dict[Value, int] = {}

    def sections(self, order: Order) -> Iterator[_Section]:
        """The step of a rank with this schedule, in order."""
        outside = self._planner.run(None)
        ends = [i for i, (s, _) in enumerate(outside) if s.op.has(Accumulates)]
        if not ends:
            yield _Section("all", [outside])
            return
        first, last = ends
        step = outside[first][0]
        yield _Section("before", [outside[: first + 1]])
        if self._planner.is_scheduled(step):
            yield from self._turns(order)
        else:
            body = _Section("body", [outside[first + 1 : last]])
            yield from repeat(body, evaluate(step.op.expr("count"), self._env))
        end, *after = outside[last:]
        without_sums = replace(end[0], made=[]), end[1]  # the actions allocate the sums
        yield _Section("after", [[without_sums, *after]])

    def _turns(self, order: Order) -> Iterator[_Section]:
        """Each turn, and the receives before it, whose buffers count from the action that uses
        them, as in the plan."""
        place, regions = 0, self._planner.regions
        for doing in turns(order.actions, regions, self._planner.summed):
            for action in order.receives.get(place, ()):
                region = next(regions_of(action))
                steps = (
                    self._planner.run(((region,), MicrobatchState())) if region in regions else ()
                )
                receives = [(replace(s, made=[]), ()) for s, _ in steps if _is_posted(s)]
                yield _Section(("receives", region), [receives])
            place += len(doing.actions)
            yield _Section(doing.works, [self._planner.run(w) for w in doing.works if w[0]])

    def bytes(self, buffers: Sequence[Buffer]) -> int:
        """The bytes of buffers in device memory."""
        return sum(self._size(b.value) for b in buffers)

    def _size(self, value: Value) -> int:
        if value not in self._sizes:
            self._sizes[value] = evaluate(device_bytes(value), self._env)
        return self._sizes[value]

    def interleaved(self, runs: Sequence[MemoryRun]) -> MemoryRun:
        """The steps of actions that run together: they alternate at collectives, and their sends
        come at the end."""
        if len(runs) < 2:
            return [step for run in runs for step in run]
        last = [step for run in runs for step in run if _is_end(step[0], SendOp)]
        rest = [tuple(step for step in run if not _is_end(step[0], SendOp)) for run in runs]
        queues = [list(self._between_calls(run)) for run in rest]
        turns_ = zip_longest(*queues, fillvalue=())
        return [step for turn in turns_ for q in turn for step in q] + last

    def _between_calls(self, run: MemoryRun) -> Iterator[MemoryRun]:
        start = 0
        for end, (step, _) in enumerate(run, 1):
            if self._is_call(step.op):
                yield run[start:end]
                start = end
        yield run[start:]

    def _is_call(self, op: Operation) -> bool:
        collective = isinstance(op.definition, Collective)
        return (
            collective
            and not isinstance(op.definition, CollectivePermute)
            and "bucket" not in op.attrs
        )


def _is_end(step: RunOp, kind: type[OpDef]) -> bool:
    """Whether a step is an end of a message between actions, of this kind."""
    return isinstance(step.op.definition, kind)


def _is_posted(step: RunOp) -> bool:
    """Whether a step is a receive before its action: it has no buffer from outside of it."""
    return _is_end(step, RecvOp) and not step.op.operands


# -- the program -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Aligned:
    """A section as nodes: the numbers of their original operations, and their events."""

    origins: Ints
    events: Ints


class _Overlay:
    """Aligns the sections of a plan with a program. The calls of a bucketed reduction and the
    receives of caches have another order, and have no events; nor have gathers of parameters
    without `gathers`, where a plan has them elsewhere than a program, such as beside the loss."""

    def __init__(self, plan: _Plan, program: Program, *, gathers: bool = True) -> None:
        self._plan, self._count = plan, len(program)
        self._numbers: dict[Operation | None, int] = {}
        self._nodes_of: Counter[Operation] = Counter()
        self._known: dict[Hashable, _Aligned] = {}
        origins = [n.op.origin if n.op is not None else None for n in program.prototypes]
        numbered = [self._numbers.setdefault(op, len(self._numbers)) for op in origins]
        moved = {op for op in origins if op is not None and not gathers and is_ahead(op)}
        nodes = zip(program.prototypes, origins, strict=True)
        cut = np.array([n.bucket or bool(cache_splits(n)) or o in moved for n, o in nodes], bool)
        self._places = np.flatnonzero(~cut[program.prototype])
        self._origins = np.array(numbered, dtype=np.int64)[program.prototype[self._places]]
        for counts in _nodes_by_region(program.prototypes):
            self._nodes_of |= counts

    def events(self, sections: Iterator[_Section]) -> Events:
        """The events of all nodes. Raises `DiagnosticError` for nodes that were not planned."""
        changes = np.zeros((2, self._count), dtype=np.int64)
        waiting = np.zeros((2, 0), dtype=np.int64)
        at = 0
        for section in sections:
            if section.key not in self._known:
                self._known[section.key] = self._aligned(section, at)
            known = self._known[section.key]
            count = len(known.origins)
            if not np.array_equal(self._origins[at : at + count], known.origins):
                raise _other_than_planned(f"a node from {self._places[at] + 1} on is another one")
            if not count:
                waiting = np.concatenate([waiting, known.events], axis=1)
                continue
            places = self._places[at : at + count]
            changes[:, places] = known.events
            changes[:, places[0]] = _as_one(
                np.insert(waiting, waiting.shape[1], changes[:, places[0]], axis=1)
            )
            waiting, at = waiting[:, :0], at + count
        if at < len(self._places):
            raise _other_than_planned(f"node {self._places[at] + 1} is not in it")
        if waiting.size:
            last = changes[:, self._places[-1]]
            changes[:, self._places[-1]] = _as_one(np.insert(waiting, 0, last, axis=1))
        return Events(self._plan.static, changes[0], changes[1])

    def _aligned(self, section: _Section, at: int) -> _Aligned:
        """The nodes of a section that starts at node `at`: each step has those of its operation, or
        none."""
        steps: list[tuple[int, int]] = []
        starts: list[int] = []
        origins: list[int] = []
        begun: int | None = None  # the first step that belongs to the next node
        for step, ends in self._plan.interleaved(section.runs):
            nodes = self._nodes(step.op, at + len(origins))
            for _ in nodes[1:]:
                starts.append(len(steps) if begun is None else begun)
                steps.append((0, 0))
                begun = None
            event = self._plan.bytes(step.made), self._plan.bytes(ends)
            if nodes:
                starts.append(len(steps) if begun is None else begun)
                begun = None
            elif event[0] and begun is None:
                begun = len(steps)
            steps.append(event)
            origins += nodes
        if starts:
            starts[0] = 0
        alone = np.array(steps, dtype=np.int64).reshape(-1, 2).T
        merged = _merged(alone, starts) if starts else alone
        return _Aligned(np.array(origins, dtype=np.int64), merged)

    def _nodes(self, op: Operation, at: int) -> list[int]:
        wanted = [self._numbers.get(op, -1)] * self._nodes_of[op]
        origins: list[int] = self._origins[at : at + len(wanted)].tolist()
        return origins if origins == wanted else []


def _nodes_by_region(nodes: Sequence[Node]) -> Iterable[Counter[Operation]]:
    """For each region, the number of nodes of each original operation: two if it sends and
    receives."""
    lowered = dict.fromkeys(n.op for n in nodes if n.op is not None)
    regions: dict[Region | None, Counter[Operation]] = {}
    for op in lowered:
        if op.origin is not None:
            regions.setdefault(op.parent, Counter())[op.origin] += 1
    return regions.values()


def _other_than_planned(what: str) -> DiagnosticError:
    return error(
        f"--memory-events: the trace does not follow the memory plan: {what}",
        remedy="put plan-memory right before lower-to-trace in --pipeline",
    )


def _merged(events: Ints, starts: Sequence[int]) -> Ints:
    merged = Events(0, events[0], events[1]).merged(np.array(starts, dtype=np.int64))
    return np.stack([merged.alloc, merged.free])


def _as_one(events: Ints) -> Ints:
    return _merged(events, [0])[:, 0]
