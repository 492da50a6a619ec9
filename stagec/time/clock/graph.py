"""The nodes of a step and what each waits for, as arrays: those of one rank of each class, which
stands for all of its ranks.

    stage0   0 forward   1 send                  1 waits for 0
    stage1   2 receive   3 forward   4 send      2 waits for 1, 3 for 2, 4 for 3
    stage0   5 receive   6 backward              5 waits for 4, 6 for 5 and for 0

A node waits for what its own edges say, for the node before it on each of its streams, and for
other classes: a receive for what is sent to it, a call for all of its members. `definition` says
the same of every rank. What nodes cost is left open: a graph is that of a job in all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stagec.program.groups import Channel, GroupAxes, channel_of
from stagec.program.nodes import Ints, Node, Program
from stagec.support.diagnostics import error
from stagec.time.clock.speed import looped
from stagec.time.streams import BUBBLE, COMPUTE, Part, Stream, part_of, streams_of

Indices = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
#: The number of a class, and a channel of it.
Way = tuple[int, Channel]
#: Where nodes meet others: a group, or a channel.
Meeting = GroupAxes | Channel
#: What a node is to other classes: nothing, a member of a call, a message that comes from others or
#: from the class itself, or one that waits for its receivers.
ALONE, CALL, RECEIVE, RECEIVE_OWN, SEND = range(5)
_NO_NODES: Indices = np.zeros(0, dtype=np.int32)
_NO_EDGES: Indices = np.zeros((2, 0), dtype=np.int32)


class OnStreams(NamedTuple):
    """A node on its streams, whether one of them is that of computations, what its time counts as,
    and where it may meet others: in a group, or on a channel."""

    node: Node
    streams: tuple[Stream, ...]
    computes: bool
    part: Part
    meets: Meeting | None = None

    @classmethod
    def on(cls, node: Node, streams: tuple[Stream, ...], meets: Meeting | None = None) -> OnStreams:
        """A node on these streams."""
        return cls(node, streams, COMPUTE in streams, part_of(node), meets)


class ClassIssue(NamedTuple):
    """What a rank of a class issues, and the numbers of the classes that it waits for: those that
    the messages of a channel come from, each with the channel on which it sends them, and those
    that a collective joins."""

    name: str
    program: Program
    senders: Mapping[Channel, Sequence[Way]]
    members: Mapping[GroupAxes, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class ClassNodes:
    """The nodes of a class: node `first + i` of the graph is `prototypes[prototype[i]]`, and that
    `joins` classes as said above. The prototypes of all classes are numbered from `shift` on."""

    number: int
    name: str
    first: int
    shift: int
    prototypes: Sequence[OnStreams]
    prototype: Indices
    joins: npt.NDArray[np.int8]

    @property
    def own(self) -> slice:
        """Its nodes among all."""
        return slice(self.first, self.first + len(self.prototype))

    def that(self, are: Callable[[OnStreams], bool]) -> Flags:
        """Which of its nodes are something."""
        return np.array([*map(are, self.prototypes)], dtype=bool)[self.prototype]

    @cached_property
    def computing(self) -> Indices:
        """The places of its nodes on the stream of computations, in order."""
        return np.flatnonzero(self.that(lambda p: p.computes)).astype(np.int32)

    @cached_property
    def computed(self) -> Ints:
        """How often its stream of computations runs each prototype, but for what joins classes."""
        runs = np.array([p.computes for p in self.prototypes], dtype=bool) & (self.joins == ALONE)
        return np.where(runs, np.bincount(self.prototype, minlength=len(runs)), 0)

    @cached_property
    def parts(self) -> tuple[list[Part], Ints]:
        """What times count as, and which of these its prototypes are; the last one is a bubble."""
        numbers: dict[Part, int] = {}
        of = [numbers.setdefault(p.part, len(numbers)) for p in self.prototypes]
        return [*numbers, BUBBLE], np.array([*of, len(numbers)])

    @cached_property
    def last(self) -> list[int]:
        """The place of the last node on each stream, in the order in which they are first used;
        that of computations comes last."""
        kinds: list[int] = self.prototype.tolist()
        last = {kind: place for place, kind in enumerate(kinds)}
        ends: dict[Stream, int] = {}
        for i, place in last.items():
            for stream in self.prototypes[i].streams:
                ends[stream] = max(place, ends.get(stream, 0))
        return [ends[stream] for stream in sorted(ends, key=lambda stream: stream == COMPUTE)]


class Beside(NamedTuple):
    """The collectives that computations are slower beside: their `nodes`, class by class. Of each
    node `past` says how many of them were issued before it (-1 if it is no computation), and
    `owner` its class; `low` has how many are of earlier classes."""

    nodes: Indices
    past: Indices
    owner: Indices
    low: Indices


class StepGraph:
    """The graph of a step: node i waits for `before[begins[i] : begins[i + 1]]`.

    Behind the nodes stand those that say that the receiver of a message is ready, for the receives
    `heard`. The members of a call are `calls[i : j]` for two numbers of `call_begins` that follow
    each other: the first of them waits for what all wait for, the others for the first; each of
    `calls` has it in `leaders`. The receives are `received`.
    """

    def __init__(self, issues: Sequence[ClassIssue], classes: Sequence[ClassNodes]) -> None:
        self.classes = classes
        self.prototype = np.concatenate([each.shift + each.prototype for each in classes])
        self.joins = np.concatenate([each.joins[each.prototype] for each in classes])
        made = _Edges(issues, self)
        self.calls, self.call_begins, self.heard = made.calls, made.call_begins, made.heard
        self.leaders = made.lead[made.calls]
        received = (self.joins == RECEIVE) | (self.joins == RECEIVE_OWN)
        self.received = np.flatnonzero(received).astype(np.int32)
        self.begins, self.before = made.by_node(self.count)

    @property
    def count(self) -> int:
        """How many nodes there are, with those behind them."""
        return len(self.prototype) + len(self.heard)

    @cached_property
    def order(self) -> Indices:
        """An order in which each node comes after those that it waits for. Raises
        `DiagnosticError` if classes wait for each other in a ring."""
        return self._order(np.zeros((2, 0), dtype=np.int32))

    @cached_property
    def order_beside(self) -> Indices:
        """One in which computations come after the collectives that may run beside them, too."""
        nodes, past, owner, _ = self.beside
        computations = np.flatnonzero(past >= 0).astype(np.int32)
        place = np.searchsorted(computations, nodes)
        nodes = nodes[place < len(computations)]
        after = computations[place[place < len(computations)]]
        same = owner[after] == owner[nodes]
        return self._order(np.stack([after[same], nodes[same]]))

    def _order(self, more: Indices) -> Indices:
        """An order, with further edges."""
        later, earlier = (np.ascontiguousarray(row) for row in more)
        sizes = self.count, self.count + 2, len(self.before) + len(later)
        turned = [np.zeros(size, dtype=np.int32) for size in sizes]
        looped("turn_round", self.begins, self.before, later, earlier, *turned)
        order = np.empty(self.count, dtype=np.int32)
        number: int = looped("put_in_order", *turned, order)
        if number < self.count:
            left = np.ones(self.count, dtype=bool)
            left[order[:number]] = False
            late = [each.name for each in self.classes if left[each.own].any()]
            raise error(
                f"deadlock: {', '.join(late)} wait for each other",
                remedy="run 'stagec check' on the traces, which reports the order of messages",
            )
        return order

    @cached_property
    def beside(self) -> Beside:
        """The collectives that computations are slower beside: those within a class."""
        nodes: list[Ints] = []
        past = np.full(self.count, -1, dtype=np.int32)
        owner = np.zeros(self.count, dtype=np.int32)
        low: list[int] = []
        number = 0
        for each in self.classes:
            slowing = each.that(lambda p: p.node.is_collective and not p.computes)
            slowing &= each.joins[each.prototype] == ALONE
            slowed = each.that(lambda p: p.node.is_computation)
            past[each.own] = np.where(slowed, number + np.cumsum(slowing), -1)
            owner[each.own] = each.number
            low.append(number)
            nodes.append(each.first + np.flatnonzero(slowing))
            number += len(nodes[-1])
        return Beside(
            np.concatenate(nodes).astype(np.int32), past, owner, np.array(low, dtype=np.int32)
        )


def step_graph(
    issues: Sequence[ClassIssue],
    *,
    overlap: bool = True,
    one_stream: bool = False,
    waits: Callable[[Node], bool] = lambda node: False,
) -> StepGraph:
    """The graph of these classes. Without overlap collectives within a class are blocking; with one
    stream collectives, sends and copies share it; `waits` says which messages wait for their
    receivers."""

    # an operation runs many times, each on the same streams
    meetings: dict[object, Meeting | None] = {}
    runs: dict[object, OnStreams] = {}

    def meets(node: Node) -> Meeting | None:
        run = node.op or node
        if run not in meetings:
            meetings[run] = _meets(node)
        return meetings[run]

    def placed(node: Node, joins: int) -> OnStreams:
        run = node.op or node, node.by, node.kernel is None, joins
        on_streams = runs.get(run)
        if on_streams is None:
            beside = overlap or joins == CALL
            streams = streams_of(node, overlap=beside, one_stream=one_stream)
            on_streams = runs[run] = OnStreams.on(node, streams, meets(node))
        return OnStreams(node, *on_streams[1:])

    classes: list[ClassNodes] = []
    first = shift = 0
    for number, each in enumerate(issues):
        nodes, prototype = each.program.prototypes, each.program.prototype
        joins = [_joins(node, meets(node), number, each, waits) for node in nodes]
        prototypes = [*map(placed, nodes, joins)]
        columns = prototype.astype(np.int32), np.array(joins, dtype=np.int8)
        classes.append(ClassNodes(number, each.name, first, shift, prototypes, *columns))
        first, shift = first + len(prototype), shift + len(nodes)
    return StepGraph(issues, classes)


def _meets(node: Node) -> Meeting | None:
    """Where a node meets others: a group, or a channel."""
    if node.is_message and node.op is not None:
        return channel_of(node.op)
    return node.group if node.is_collective else None


def _joins(
    node: Node, meets: Meeting | None, number: int, issue: ClassIssue, waits: Callable[[Node], bool]
) -> int:
    """What a node is to other classes."""
    if meets is None:
        return ALONE
    if isinstance(meets, GroupAxes):
        return CALL if len(issue.members[meets]) > 1 else ALONE
    if node.kind == "recv":
        return RECEIVE_OWN if [*issue.senders.get(meets, ())] == [(number, meets)] else RECEIVE
    return SEND if waits(node) else ALONE


class _Edges:
    """Edges of a graph, as rows of sources and of what these wait for. Where several of the nodes
    that one waits for end together, the first edge says what it waited for."""

    def __init__(self, issues: Sequence[ClassIssue], graph: StepGraph) -> None:
        self._issues, self._classes = issues, graph.classes
        self._never: list[Indices] = []
        calls = list(self._calls())
        self.calls = np.concatenate([_NO_NODES, *(call.ravel() for call in calls)])
        lengths = [length for call in calls for length in [call.shape[1]] * len(call)]
        self.call_begins = np.cumsum([0, *lengths])[:-1]
        size = len(graph.joins)
        self.lead = np.arange(size, dtype=np.int32)
        self.lead[self.calls] = np.repeat(self.calls[self.call_begins], lengths)
        self._sent = np.concatenate([_NO_EDGES, *self._messages()], axis=1)
        self._handshakes = self._sent[:, graph.joins[self._sent[1]] == SEND]
        self.heard: Indices = np.unique(self._handshakes[0])
        #: Of receives that are heard of, what says that they are ready; else 0.
        self._behind = np.zeros(size, dtype=np.int32)
        self._behind[self.heard] = size + np.arange(len(self.heard), dtype=np.int32)

    def by_node(self, count: int) -> tuple[Indices, Indices]:
        """Where those of each node begin, of so many with those behind them, and what they wait
        for: first what is sent; then its own edges, of what joins classes from the last one on, and
        the order of streams; then what leads, or that receivers are ready."""
        own: list[Indices] = []
        others: list[Indices] = [*self._led(), *self._ready()]
        for issue, each in zip(self._issues, self._classes, strict=True):
            waits = np.concatenate([_own_edges(issue, each), _stream_edges(each)], axis=1)
            lead = self.lead[waits[0]]
            here = lead == waits[0]
            own.append(_those(waits, here))
            others.append(_those(np.stack([lead, waits[1]]), ~here))
            behind = self._behind[waits[0]]
            others.append(_those(np.stack([behind, waits[1]]), behind > 0))
        first, last = (_sorted(np.concatenate(e, axis=1)) for e in ([self._sent], others))
        lengths: list[Ints] = []
        before: list[Indices] = []
        bounds = [*(each.first for each in self._classes), len(self.lead), count]
        for (begin, end), mine in zip(pairwise(bounds), [*own, _NO_EDGES], strict=True):
            edges = [_between(first, begin, end), mine, _between(last, begin, end)]
            sources, targets = _sorted(np.concatenate(edges, axis=1))
            lengths.append(np.bincount(sources - begin, minlength=end - begin))
            before.append(targets)
        begins = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int32)
        return begins, np.concatenate(before)

    def _led(self) -> Iterator[Indices]:
        """From members of calls to those that lead, and from what never happens to itself."""
        members = self.calls[self.lead[self.calls] != self.calls]
        yield np.stack([members, self.lead[members]])
        never = np.concatenate([_NO_NODES, *self._never])
        yield np.stack([never, never])

    def _ready(self) -> Iterator[Indices]:
        """From messages to their receivers."""
        yield np.stack([self._handshakes[1], self._behind[self._handshakes[0]]])

    def _calls(self) -> Iterator[Indices]:
        """The calls of each group of classes, a row for each."""
        groups: dict[tuple[GroupAxes, tuple[int, ...]], dict[int, Indices]] = {}
        for issue, each in zip(self._issues, self._classes, strict=True):
            for group, nodes in _nodes_by(each, (CALL,), GroupAxes).items():
                groups.setdefault((group, issue.members[group]), {})[each.number] = nodes
        for (_, members), of in groups.items():
            columns: list[Indices] = [of.get(number, _NO_NODES) for number in members]
            count = min(map(len, columns))
            self._never += [column[count:] for column in columns]
            yield np.stack([column[:count] for column in columns], axis=1)

    def _messages(self) -> Iterator[Indices]:
        """From each receive to the messages that it waits for. What another pod sends that is not
        replayed is there from the start."""
        sent: dict[Way, Indices] = {}
        for each in self._classes:
            for way, nodes in _nodes_by(each, (ALONE, SEND), tuple).items():
                sent[each.number, way] = nodes
        for issue, each in zip(self._issues, self._classes, strict=True):
            for way, nodes in _nodes_by(each, (RECEIVE, RECEIVE_OWN), tuple).items():
                for sender in issue.senders.get(way, ()):
                    came = sent.get(sender, _NO_NODES)[: len(nodes)]
                    self._never.append(nodes[len(came) :])
                    yield np.stack([nodes[: len(came)], came])


def _nodes_by(each: ClassNodes, joins: Sequence[int], kind: type) -> Mapping[Any, Indices]:
    """The nodes of a class that join others in one of these ways, by where they meet, which is of
    this kind, in order."""
    numbers: dict[Meeting, int] = {}
    kinds = np.full(len(each.prototypes), -1)
    for i in np.flatnonzero(np.isin(each.joins, joins)).tolist():
        meets = each.prototypes[i].meets
        if meets is not None and type(meets) is kind:
            kinds[i] = numbers.setdefault(meets, len(numbers))
    kind_of = kinds[each.prototype]
    places = {of: np.flatnonzero(kind_of == n) for of, n in numbers.items()}
    return {of: each.first + place.astype(np.int32) for of, place in places.items()}


def _own_edges(issue: ClassIssue, each: ClassNodes) -> Indices:
    """What nodes of a class take and are ordered after. Computations follow each other anyway, as
    all of one stream do; traces order collectives of different communicators, which have streams of
    their own here."""
    program = issue.program
    lengths = np.diff(program.starts)
    sources = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    targets = program.edges.astype(np.int32) - 1
    ordered = np.arange(len(targets)) >= program.control[sources]
    computes = np.zeros(len(lengths), dtype=bool)
    computes[each.computing] = True
    calls = each.that(lambda p: isinstance(p.meets, GroupAxes))
    implied = computes[sources] & computes[targets]
    implied |= ordered & calls[sources] & calls[targets]
    edges = _those(np.stack([sources, targets]), ~implied)
    joining = each.joins[each.prototype[edges[0]]] != ALONE
    last_first = _sorted(_those(edges, joining)[:, ::-1])
    return each.first + np.concatenate([last_first, _those(edges, ~joining)], axis=1)


def _stream_edges(each: ClassNodes) -> Indices:
    """From each node to the one before it on its streams, that of computations first."""
    numbers: dict[Stream, int] = {}
    of = (placed.streams[-1] for placed in each.prototypes)
    others = [numbers.setdefault(s, len(numbers)) if s != COMPUTE else -1 for s in of]
    stream = np.array(others, dtype=np.int16)[each.prototype]
    ordered = np.argsort(stream, kind="stable").astype(np.int32)
    stream = stream[ordered]
    same = (stream[1:] == stream[:-1]) & (stream[1:] >= 0)
    sources = np.append(each.computing[1:], ordered[1:][same])
    return each.first + np.stack([sources, np.append(each.computing[:-1], ordered[:-1][same])])


def _sorted(edges: Indices) -> Indices:
    """Edges by their sources."""
    return edges.take(np.argsort(edges[0], kind="stable"), axis=1)


def _those(edges: Indices, chosen: Flags) -> Indices:
    """Some of the edges."""
    return edges.compress(chosen, axis=1)


def _between(edges: Indices, first: int, last: int) -> Indices:
    """Those of some sources, of edges that are sorted."""
    return edges[:, slice(*np.searchsorted(edges[0], (first, last)))]
