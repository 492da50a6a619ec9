"""The times of the nodes of a step for given costs, and what the time of each class goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np

from stagec.program.nodes import Ints
from stagec.time.clock.graph import CALL, RECEIVE, ClassNodes, Indices, OnStreams, StepGraph
from stagec.time.clock.speed import looped
from stagec.time.streams import BUBBLE, INTERFERENCE, LAUNCH, MOST, Cost, Part


class NodeCosts(NamedTuple):
    """Picoseconds of the prototypes of all classes of a graph: the fields of `Cost` as columns."""

    time: Ints
    launch: Ints
    handshake: Ints

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> NodeCosts:
        """The costs of prototypes, in order; columns of Python integers if 64 bits are too few."""
        rows = [(c.time, c.launch, c.handshake or 0) for c in costs]
        kind: Any = np.int64 if all(max(row) <= MOST for row in rows) else object
        return cls(*np.array(rows, dtype=kind).reshape(-1, 3).T)

    @property
    def spans(self) -> Ints:
        """The times with the gap before each."""
        return self.time + self.launch

    def take(self, numbers: Ints | Indices) -> NodeCosts:
        """The costs of the prototypes with these numbers."""
        return NodeCosts(*(column[numbers] for column in self))


class _GraphTimes(NamedTuple):
    """The start and end of each node of a graph, in picoseconds, and the node that it waited for
    last, or -1."""

    start: Ints
    end: Ints
    cause: Indices


class ClockedStep(Sequence["ClassTimes"]):
    """The times of a graph with these costs, by class. Collectives take `slowdown` 1024ths of the
    speed of computations that run at the same time. Raises `DiagnosticError` if classes wait for
    each other in a ring."""

    def __init__(self, graph: StepGraph, costs: NodeCosts, slowdown: int = 0) -> None:
        self.graph, self.costs, self._slowdown = graph, costs, slowdown
        self.ends = [int(self.ran.end[each.own].max(initial=0)) for each in graph.classes]

    @property
    def end(self) -> int:
        """The end of the step, in picoseconds."""
        return max(self.ends, default=0)

    def forget(self) -> None:
        """Keep the ends of classes alone; all else is computed again when it is needed."""
        for name in ("ran", "_classes"):
            vars(self).pop(name, None)

    @cached_property
    def ran(self) -> _GraphTimes:
        """The times of all nodes."""
        graph, span = self.graph, self._spans()
        start, end = np.zeros_like(span), np.zeros_like(span)
        cause = np.empty(graph.count, dtype=np.int32)
        about = graph.begins, graph.before, span, start, end, cause
        if not self._slowdown:
            none, no_time = np.empty(0, dtype=np.int32), np.empty(0, dtype=span.dtype)
            looped("run", graph.order, *about, no_time, none, none, none, none, 1024)
        else:
            nodes, past, owner, low = graph.beside
            gap = np.zeros_like(span)
            gap[: len(graph.prototype)] = self.costs.launch[graph.prototype]
            beside = gap, past, owner, nodes, low.copy(), 1024 - self._slowdown
            looped("run", graph.order_beside, *about, *beside)
        start[graph.calls], cause[graph.calls] = start[graph.leaders], cause[graph.leaders]
        ready = cause >= len(graph.prototype)
        cause[ready] = cause[cause[ready]]  # what the receiver waited for
        return _GraphTimes(start, end, cause)

    def _spans(self) -> Ints:
        """How long nodes take if nothing slows them down. A call takes as long as the slowest of
        its members; a receive ends when its message arrives."""
        graph, costs = self.graph, self.costs
        span: Ints = costs.spans[graph.prototype]
        if len(graph.heard):
            span = np.append(span, costs.handshake[graph.prototype[graph.heard]])
        span[graph.received] = 0
        if len(graph.calls):
            of_members = costs.time[graph.prototype[graph.calls]]
            span[graph.calls] = 0
            first = graph.calls[graph.call_begins]
            span[first] = np.maximum.reduceat(of_members, graph.call_begins)
        unit = 1024 if self._slowdown else 1  # the loop counts slowed work in 1024ths
        fits = span.dtype != object and float(span.sum(dtype=float)) * unit <= MOST
        return span if fits else span.astype(object)

    def computing(self, number: int) -> int:
        """Picoseconds of all nodes on the compute stream of a class, those that join classes left
        out."""
        each = self[number]
        return int((each.costs.spans.astype(self.ran.end.dtype) * each.nodes.computed).sum())

    def __len__(self) -> int:
        return len(self.graph.classes)

    @overload
    def __getitem__(self, number: int) -> ClassTimes: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ClassTimes]: ...
    def __getitem__(self, number: int | slice) -> ClassTimes | Sequence[ClassTimes]:
        return self._classes[number]

    @cached_property
    def _classes(self) -> list[ClassTimes]:
        ends, classes = self.ends, self.graph.classes
        return [ClassTimes(self.ran, self.costs, n, ends[n.number]) for n in classes]


class Wait(NamedTuple):
    """An interval in which the compute stream of a rank is idle, in picoseconds, and the category
    that it counts as."""

    start: int
    end: int
    part: Part


class ClassTimes:
    """The times of the nodes of a class, of which one rank stands for all. A node is a number of
    the graph."""

    def __init__(self, ran: _GraphTimes, costs: NodeCosts, nodes: ClassNodes, end: int) -> None:
        self._ran, self._all, self.nodes, self.end = ran, costs, nodes, end
        self.number, self.name = nodes.number, nodes.name

    def __len__(self) -> int:
        return len(self.nodes.prototype)

    @property
    def start(self) -> Ints:
        """The starts of its nodes, in picoseconds."""
        return self._ran.start[self.nodes.own]

    @property
    def ends(self) -> Ints:
        """The ends of its nodes, in picoseconds."""
        return self._ran.end[self.nodes.own]

    @cached_property
    def costs(self) -> NodeCosts:
        """The costs of its prototypes."""
        shift = self.nodes.shift
        prototypes = slice(shift, shift + len(self.nodes.prototypes))
        return NodeCosts(*(column[prototypes] for column in self._all))

    @property
    def launch(self) -> Ints:
        """The launch gaps of its nodes, in picoseconds."""
        return self.costs.launch[self.nodes.prototype]

    @property
    def spans(self) -> Ints:
        """How long its nodes would take if nothing slowed them down, in picoseconds."""
        return self.costs.spans[self.nodes.prototype]

    @property
    def causes(self) -> Indices:
        """The node of the graph that each waited for last, or -1."""
        return self._ran.cause[self.nodes.own]

    def placed(self, node: int) -> OnStreams:
        """The prototype of a node."""
        return self.nodes.prototypes[int(self.nodes.prototype[node - self.nodes.first])]

    @property
    def last(self) -> int:
        """The node that ends last. Of several it is the one on the stream that is used first, where
        the compute stream counts as the last one."""
        ends = self.ends
        return self.nodes.first + max(self.nodes.last, key=ends.__getitem__)

    def busy_time(self, step: int) -> int:
        """Picoseconds of a step in which it does not wait for other classes."""
        return step - self.parts(step).get(BUBBLE, 0)

    def parts(self, step: int) -> dict[Part, int]:
        """What the compute stream spends a step of `step` picoseconds on; adds up to the step."""
        nodes, of = self.nodes, self.nodes.prototype
        start, end = self.start[nodes.computing], self.ends[nodes.computing]
        times, launches = (c.astype(end.dtype) * nodes.computed for c in self.costs[:2])
        call = nodes.joins[of[nodes.computing]] == CALL
        at, since, until = self._waits
        totals: Counter[Part] = Counter()
        self._add(totals, np.arange(len(times)), times)
        self._add(totals, of[nodes.computing[call]], (end - start)[call])
        self._add(totals, np.where(at >= 0, of[at], -1), until - since)
        totals[LAUNCH] += int(launches.sum())
        totals[INTERFERENCE] += int((end - start)[~call].sum() - times.sum() - launches.sum())
        totals[BUBBLE] += step - self.end
        return {part: time for part, time in totals.items() if time}

    def _add(self, parts: Counter[Part], prototypes: Ints | Indices, times: Ints) -> None:
        """Add times to the categories of their prototypes; prototype -1 is a bubble."""
        names, numbers = self.nodes.parts
        for number, name in enumerate(names):
            parts[name] += int(times[numbers[prototypes] == number].sum())

    @property
    def waits(self) -> list[Wait]:
        """The waits of the compute stream until the class ends. A wait counts as the node waited
        for while that runs, and before that as what this node waits for in turn; time in which
        other classes are late is a bubble."""
        at, since, until = self._waits
        names, numbers = self.nodes.parts
        kinds: list[int] = numbers[np.where(at >= 0, self.nodes.prototype[at], -1)].tolist()
        parts = [names[kind] for kind in kinds]
        return sorted(map(Wait, since.tolist(), until.tolist(), parts))

    @cached_property
    def _waits(self) -> tuple[Indices, Ints, Ints]:
        """The node that each part of a wait counts as, or -1, and the start and end of the part. A
        node that joins classes counts as communication for no longer than its own cost."""
        nodes, start, end = self.nodes, self.start, self.ends
        joins = nodes.joins[nodes.prototype]
        took = np.where(joins == RECEIVE, self.costs.time[nodes.prototype], end - start)
        cause = self.causes - nodes.first
        cause = np.where((cause >= 0) & (cause < len(self)), cause, -1).astype(np.int32)
        about = nodes.computing, start, end, took, cause, (joins == CALL).view(np.uint8)
        count, room = 2 * len(nodes.computing), -1
        of, since, until = np.empty(0, dtype=np.int32), took, took
        while count > room:  # the second time there is room for all
            room = count
            of = np.empty(room, dtype=np.int32)
            since, until = (np.empty(room, dtype=took.dtype) for _ in range(2))
            count = looped("spend", *about, self.last - nodes.first, of, since, until)
        return of[:count].copy(), since[:count].copy(), until[:count].copy()
