"""When the nodes of a step run, with these costs, and what the time of each class goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np

from stagec.program.nodes import Ints
from stagec.time.clock.graph import (
    CALL,
    RECEIVE,
    ClassNodes,
    Indices,
    OnStreams,
    StepGraph,
)
from stagec.time.clock.speed import looped
from stagec.time.streams import BUBBLE, COMPUTE, INTERFERENCE, LAUNCH, MOST, Cost, Part, Stream


class NodeCosts(NamedTuple):
    """Picoseconds of the prototypes of all classes of a graph, as `Cost` has them."""

    time: Ints
    launch: Ints
    handshake: Ints

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> NodeCosts:
        """The costs of one prototype after the other."""
        rows = [(c.time, c.launch, c.handshake or 0) for c in costs]
        kind: Any = np.int64 if all(max(row) <= MOST for row in rows) else object
        return cls(*np.array(rows, dtype=kind).reshape(-1, 3).T)

    @property
    def spans(self) -> Ints:
        """With the gap before each."""
        return self.time + self.launch

    def take(self, numbers: Ints | Indices) -> NodeCosts:
        """Those of prototypes with these numbers."""
        return NodeCosts(*(column[numbers] for column in self))


class _Ran(NamedTuple):
    """When the nodes of a graph start and end, and the node that each waited for last, or -1."""

    start: Ints
    end: Ints
    cause: Indices


class ClockedStep(Sequence["ClassTimes"]):
    """The times of a graph with these costs, where collectives take `slowdown` 1024ths of the speed
    of the computations beside them. Raises `DiagnosticError` if classes wait for each other in a
    ring."""

    def __init__(self, graph: StepGraph, costs: NodeCosts, slowdown: int = 0) -> None:
        self.graph, self.costs, self._slowdown = graph, costs, slowdown
        self.ends = [int(self.ran.end[each.own].max(initial=0)) for each in graph.classes]

    @property
    def end(self) -> int:
        """The end of the step, in picoseconds."""
        return max(self.ends, default=0)

    def forget(self) -> None:
        """Keep when classes end; the rest is found again if it is asked for."""
        for name in ("ran", "_classes"):
            vars(self).pop(name, None)

    @cached_property
    def ran(self) -> _Ran:
        """When nodes run."""
        graph, costs = self.graph, self.costs.take(self.graph.prototype)
        span = self._spans(costs)
        start, end = np.zeros_like(span), np.zeros_like(span)
        cause = np.empty(graph.count, dtype=np.int32)
        about = graph.begins, graph.before, span, start, end, cause
        if not self._slowdown:
            looped("run", graph.order, *about)
        else:
            nodes, past, owner, low = graph.beside
            gap = np.zeros_like(span)
            gap[: len(costs.launch)] = costs.launch
            beside = gap, past, owner, nodes, low.copy(), 1024 - self._slowdown
            looped("run_slowed", graph.order_beside, *about, *beside)
        start[graph.calls], cause[graph.calls] = start[graph.leaders], cause[graph.leaders]
        ready = cause >= len(graph.prototype)
        cause[ready] = cause[cause[ready]]  # what the receiver waited for
        return _Ran(start, end, cause)

    def _spans(self, costs: NodeCosts) -> Ints:
        """How long nodes take that are not slowed down. A call takes as long as for the slowest of
        its members; a receive ends with the message."""
        graph = self.graph
        span = np.append(costs.spans, costs.handshake[graph.heard])
        span[graph.received] = 0
        if len(graph.calls):
            longest = np.maximum.reduceat(costs.time[graph.calls], graph.call_begins)
            span[graph.calls] = 0
            span[graph.calls[graph.call_begins]] = longest
        unit = 1024 if self._slowdown else 1  # of which work beside collectives is counted
        fits = span.dtype != object and float(span.sum(dtype=float)) * unit <= MOST
        return span if fits else span.astype(object)

    def computing(self, number: int) -> int:
        """Picoseconds of all that the stream of computations of a class runs, but for what joins
        classes."""
        computed = self.graph.classes[number].computed.tolist()
        spans = self[number].costs.spans.tolist()
        return sum(time * count for time, count in zip(spans, computed, strict=True))

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
        return [ClassTimes(self, nodes) for nodes in self.graph.classes]


class Wait(NamedTuple):
    """Picoseconds in which the stream of computations of a rank has nothing to do, and what they
    count as."""

    start: int
    end: int
    part: Part


class RanNode(NamedTuple):
    """A node, and when it runs."""

    placed: OnStreams
    start: int
    end: int


class ClassTimes:
    """When the nodes of a class run: one rank of it, which stands for all. Nodes are known by their
    numbers in the graph."""

    def __init__(self, step: ClockedStep, nodes: ClassNodes) -> None:
        self.step, self.nodes = step, nodes
        self.number, self.name = nodes.number, nodes.name
        self.end = step.ends[nodes.number]

    def __len__(self) -> int:
        return len(self.nodes.prototype)

    @property
    def start(self) -> Ints:
        """When its nodes start, in picoseconds."""
        return self.step.ran.start[self.nodes.own]

    @property
    def ends(self) -> Ints:
        """When they end."""
        return self.step.ran.end[self.nodes.own]

    @cached_property
    def costs(self) -> NodeCosts:
        """What its prototypes cost."""
        shift = self.nodes.shift
        prototypes = slice(shift, shift + len(self.nodes.prototypes))
        return NodeCosts(*(column[prototypes] for column in self.step.costs))

    @property
    def launch(self) -> Ints:
        """The gaps before its nodes."""
        return self.costs.launch[self.nodes.prototype]

    @property
    def spans(self) -> Ints:
        """What its nodes would take, if nothing slowed them down."""
        return self.costs.spans[self.nodes.prototype]

    @property
    def causes(self) -> Indices:
        """The node of the graph that each waited for last, or -1."""
        return self.step.ran.cause[self.nodes.own]

    def rows(self) -> Iterator[RanNode]:
        """Its nodes, each from when it would have started that takes what it costs to its end."""
        ends = self.ends
        starts, kinds = (ends - self.spans).tolist(), self.nodes.prototype.tolist()
        for kind, start, end in zip(kinds, starts, ends.tolist(), strict=True):
            yield RanNode(self.nodes.prototypes[kind], start, end)

    def placed(self, node: int) -> OnStreams:
        """A node of it."""
        return self.nodes.prototypes[int(self.nodes.prototype[node - self.nodes.first])]

    @cached_property
    def _computing(self) -> Ints:
        """The nodes on the stream of computations, in order."""
        return self.nodes.first + self.nodes.computing

    @property
    def computed(self) -> int:
        """When its last computation ends."""
        return int(self.step.ran.end[self._computing[-1]]) if len(self._computing) else 0

    @property
    def last(self) -> int:
        """The node that ends last: of several, one on the stream that is used first, but for that
        of computations."""
        found: dict[Stream, int] = {}
        for kind, at in _last_places(self.nodes.prototype):
            for stream in self.nodes.prototypes[kind].streams:
                found[stream] = max(at, found.get(stream, at))
        ends = self.ends
        streams = sorted(found, key=lambda stream: stream == COMPUTE)
        return self.nodes.first + found[max(streams, key=lambda stream: ends[found[stream]])]

    def busy_time(self, step: int) -> int:
        """Picoseconds of a step that it does not spend on waiting for other classes."""
        return step - self.parts(step).get(BUBBLE, 0)

    def parts(self, step: int) -> dict[Part, int]:
        """What the stream of computations spends a step on that ends then; adds up to the step."""
        found: Counter[Part] = Counter()
        ran = 0
        counts: list[int] = self.nodes.computed.tolist()
        for i in np.flatnonzero(counts).tolist():
            time, launch = int(self.costs.time[i]), int(self.costs.launch[i])
            found[self.nodes.prototypes[i].part] += time * counts[i]
            found[LAUNCH] += launch * counts[i]
            ran += (time + launch) * counts[i]
        joined = self.step.graph.joins[self._computing] == CALL
        took = self.step.ran.end[self._computing] - self.step.ran.start[self._computing]
        for i, time in zip(self._computing[joined].tolist(), took[joined].tolist(), strict=True):
            found[self.placed(i).part] += time
        found[INTERFERENCE] += int(took[~joined].sum()) - ran
        for wait in self.waits:
            found[wait.part] += wait.end - wait.start
        found[BUBBLE] += step - self.end
        return {part: time for part, time in found.items() if time}

    @cached_property
    def waits(self) -> list[Wait]:
        """The times in which the stream of computations waits until the class ends. What it waits
        for counts while it runs, and before that what this waits for; what other classes are late
        with is a bubble."""
        start, end, cause = self.step.ran
        now = np.concatenate([[0], end[self._computing]])
        late = np.flatnonzero(start[self._computing] > now[:-1])
        found: list[Wait] = []
        for i, since in zip(self._computing[late].tolist(), now[late].tolist(), strict=True):
            if self.step.graph.joins[i] == CALL:
                found.append(Wait(since, int(start[i]), BUBBLE))
            else:
                found += self._spent(int(cause[i]), since, int(start[i]))
        if self.end > now[-1]:
            found += self._spent(self.last, int(now[-1]), self.end)
        return sorted(found)

    def _spent(self, node: int, since: int, until: int) -> Iterator[Wait]:
        """What a wait for a node, or -1, is spent on, from its end backwards. Of what joins classes
        no more than it takes is communication."""
        start, end, cause = self.step.ran
        first, last = self.nodes.first, self.nodes.first + len(self)
        while until > since and first <= node < last:
            joins, placed = self.step.graph.joins[node], self.placed(node)
            took = int(end[node] - start[node])
            if joins == RECEIVE:
                took = int(self.costs.time[self.nodes.prototype[node - first]])
            begun = max(since, until - took)
            if begun < until:
                yield Wait(begun, until, placed.part)
            node, until = int(cause[node]), begun
        if until > since:
            yield Wait(since, until, BUBBLE)


def _last_places(prototype: Indices) -> Iterator[tuple[int, int]]:
    """Each number that there is, in the order of first use, and its last place."""
    kinds, first = np.unique(prototype, return_index=True)
    reverse = len(prototype) - 1 - np.unique(prototype[::-1], return_index=True)[1]
    for i in np.argsort(first).tolist():
        yield int(kinds[i]), int(reverse[i])
