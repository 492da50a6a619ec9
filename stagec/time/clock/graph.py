"""The nodes of a step and what each waits for, as arrays. One rank of each class stands for all
ranks of the class.

    stage0   0 forward   1 send                  1 waits for 0
    stage1   2 receive   3 forward   4 send      2 waits for 1, 3 for 2, 4 for 3
    stage0   5 receive   6 backward              5 waits for 4, 6 for 5 and for 0

A node waits for its own dependencies, for the node before it on each of its streams, and for other
classes: a receive for the message, a call for all of its members. `definition` states the same for
every rank. Costs are not part of the graph, which therefore serves a job in all sizes.
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
#: The number of a class, and one of its channels.
Way = tuple[int, Channel]
#: Where nodes meet those of other ranks: in a group, or on a channel.
Meeting = GroupAxes | Channel
#: How a node joins other classes: not at all, as a member of a call, as a receive from others or
#: from the class itself, or as a send that waits for its receivers.
ALONE, CALL, RECEIVE, RECEIVE_OWN, SEND = range(5)
_NO_NODES: Indices = np.zeros(0, dtype=np.int32)
_NO_EDGES: Indices = np.zeros((2, 0), dtype=np.int32)


class OnStreams(NamedTuple):
    """A node and its streams: whether the compute stream is one of them, what its time counts as,
    and the group or channel on which it may meet other ranks."""

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
    """What a rank of a class issues, and the classes that it waits for: by channel the `senders`
    of its messages, each with the channel on which it sends, and by group the `members` of its
    collectives, as numbers of classes."""

    name: str
    program: Program
    senders: Mapping[Channel, Sequence[Way]]
    members: Mapping[GroupAxes, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class ClassNodes:
    """The nodes of a class: node `first + i` of the graph is `prototypes[prototype[i]]`, which
    joins other classes as `joins[prototype[i]]` says. In the numbering over all classes its
    prototypes begin at `shift`."""

    number: int
    name: str
    first: int
    shift: int
    prototypes: Sequence[OnStreams]
    prototype: Indices
    joins: npt.NDArray[np.int8]

    @property
    def own(self) -> slice:
        """The places of its nodes in the graph."""
        return slice(self.first, self.first + len(self.prototype))

    def where(self, predicate: Callable[[OnStreams], bool]) -> Flags:
        """For each node, whether the predicate is true of its prototype."""
        return np.array([*map(predicate, self.prototypes)], dtype=bool)[self.prototype]

    @cached_property
    def computing(self) -> Indices:
        """The places of its nodes on the compute stream, in order."""
        return np.flatnonzero(self.where(lambda p: p.computes)).astype(np.int32)

    @cached_property
    def computed(self) -> Ints:
        """How often its compute stream runs each prototype; 0 for nodes that join classes."""
        runs = np.array([p.computes for p in self.prototypes], dtype=bool) & (self.joins == ALONE)
        return np.where(runs, np.bincount(self.prototype, minlength=len(runs)), 0)

    @cached_property
    def parts(self) -> tuple[list[Part], Ints]:
        """The categories of time, and the number of the category of each prototype. Behind both
        stands the bubble."""
        numbers: dict[Part, int] = {}
        of = [numbers.setdefault(p.part, len(numbers)) for p in self.prototypes]
        return [*numbers, BUBBLE], np.array([*of, len(numbers)])

    @cached_property
    def last(self) -> list[int]:
        """The place of the last node on each stream, in the order of first use; the compute stream
        comes last."""
        used, first = np.unique(self.prototype, return_index=True)
        places = np.zeros(len(self.prototypes), dtype=np.int64)
        np.maximum.at(places, self.prototype, np.arange(len(self.prototype)))
        ends: dict[Stream, int] = {}
        order: list[int] = used[np.argsort(first)].tolist()
        for i in order:
            for stream in self.prototypes[i].streams:
                ends[stream] = max(int(places[i]), ends.get(stream, 0))
        return [ends[stream] for stream in sorted(ends, key=lambda stream: stream == COMPUTE)]


class Beside(NamedTuple):
    """The collectives that slow down computations: their `nodes`, class by class. For each node of
    the graph, `past` is how many of them were issued before it (-1 for a node that is not a
    computation) and `owner` the number of its class; `low` is how many of them belong to earlier
    classes, by class."""

    nodes: Indices
    past: Indices
    owner: Indices
    low: Indices


class StepGraph:
    """The graph of a step: node i waits for `before[begins[i] : begins[i + 1]]`.

    Behind the nodes of the programs stands one more for each receive in `heard`: that its receiver
    is ready. The members of a call are `calls[i : j]` for consecutive numbers i, j of
    `call_begins`. The first of them waits for all that the members wait for, the others wait for
    the first; `leaders` has it for each of `calls`. `received` are the receives.
    """

    def __init__(self, issues: Sequence[ClassIssue], classes: Sequence[ClassNodes]) -> None:
        self.classes = classes
        self.prototype = np.concatenate([each.shift + each.prototype for each in classes])
        self.joins = np.concatenate([each.joins[each.prototype] for each in classes])
        edges = _Edges(issues, self)
        self.calls, self.call_begins, self.heard = edges.calls, edges.call_begins, edges.heard
        self.leaders = edges.lead[edges.calls]
        received = (self.joins == RECEIVE) | (self.joins == RECEIVE_OWN)
        self.received = np.flatnonzero(received).astype(np.int32)
        self.begins, self.before = edges.by_node(self.count)

    @property
    def count(self) -> int:
        """The number of nodes, those for ready receivers included."""
        return len(self.prototype) + len(self.heard)

    @cached_property
    def order(self) -> Indices:
        """An order in which each node comes after those that it waits for. Raises
        `DiagnosticError` if classes wait for each other in a ring."""
        return self._order(np.zeros((2, 0), dtype=np.int32))

    @cached_property
    def order_beside(self) -> Indices:
        """An order in which, in addition, computations come after all collectives that may slow
        them down."""
        nodes, past, owner, _ = self.beside
        computations = np.flatnonzero(past >= 0).astype(np.int32)
        place = np.searchsorted(computations, nodes)
        nodes = nodes[place < len(computations)]
        after = computations[place[place < len(computations)]]
        same = owner[after] == owner[nodes]
        return self._order(np.stack([after[same], nodes[same]]))

    def _order(self, more: Indices) -> Indices:
        """A topological order of the graph with further edges, as rows of later and earlier
        nodes."""
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
        """The collectives that slow down computations: those within a class."""
        nodes: list[Ints] = []
        past = np.full(self.count, -1, dtype=np.int32)
        owner = np.zeros(self.count, dtype=np.int32)
        low: list[int] = []
        number = 0
        for each in self.classes:
            slowing = each.where(lambda p: p.node.is_collective and not p.computes)
            slowing &= each.joins[each.prototype] == ALONE
            slowed = each.where(lambda p: p.node.is_computation)
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
    """The graph of these classes. Without `overlap` collectives within a class are blocking; with
    `one_stream` collectives, sends and copies share a stream; `waits` says which messages wait for
    their receivers."""

    classes: list[ClassNodes] = []
    first = shift = 0
    for number, each in enumerate(issues):
        nodes, prototype = each.program.prototypes, each.program.prototype
        runs: dict[object, tuple[int, OnStreams]] = {}  # nodes of an operation are on the same
        joins: list[int] = []
        prototypes: list[OnStreams] = []
        for node in nodes:
            run = node.op or node, node.by, node.kernel is None, waits(node)
            known = runs.get(run)
            if known is None:
                meets = _meets(node)
                how = _joins(node, meets, number, each, waits)
                beside = overlap or how == CALL
                streams = streams_of(node, overlap=beside, one_stream=one_stream)
                known = runs[run] = how, OnStreams.on(node, streams, meets)
            joins.append(known[0])
            prototypes.append(OnStreams(node, *known[1][1:]))
        columns = prototype.astype(np.int32), np.array(joins, dtype=np.int8)
        classes.append(ClassNodes(number, each.name, first, shift, prototypes, *columns))
        first, shift = first + len(prototype), shift + len(nodes)
    return StepGraph(issues, classes)


def _meets(node: Node) -> Meeting | None:
    """The group or channel on which a node meets other ranks."""
    if node.is_message and node.op is not None:
        return channel_of(node.op)
    return node.group if node.is_collective else None


def _joins(
    node: Node, meets: Meeting | None, number: int, issue: ClassIssue, waits: Callable[[Node], bool]
) -> int:
    """How a node joins other classes: `ALONE`, `CALL` and so on."""
    if meets is None:
        return ALONE
    if isinstance(meets, GroupAxes):
        return CALL if len(issue.members[meets]) > 1 else ALONE
    if node.kind == "recv":
        return RECEIVE_OWN if [*issue.senders.get(meets, ())] == [(number, meets)] else RECEIVE
    return SEND if waits(node) else ALONE


class _Edges:
    """The edges of a graph, as rows of sources and of the nodes that these wait for. Where several
    of them end together, the first edge names the cause of the wait."""

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
        #: For receives in `heard`, the node that says that the receiver is ready; else 0.
        self._behind = np.zeros(size, dtype=np.int32)
        self._behind[self.heard] = size + np.arange(len(self.heard), dtype=np.int32)

    def by_node(self, count: int) -> tuple[Indices, Indices]:
        """Where the edges of each of `count` nodes begin, and the nodes that they lead to: messages
        first; then the node's own edges (of nodes that join classes from the last one on) and the
        order of streams; then the leaders of calls and ready receivers."""
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
        """From members of calls to their leaders, and from nodes that never run to themselves."""
        members = self.calls[self.lead[self.calls] != self.calls]
        yield np.stack([members, self.lead[members]])
        never = np.concatenate([_NO_NODES, *self._never])
        yield np.stack([never, never])

    def _ready(self) -> Iterator[Indices]:
        """From messages with a handshake to the nodes that say that their receivers are ready."""
        yield np.stack([self._handshakes[1], self._behind[self._handshakes[0]]])

    def _calls(self) -> Iterator[Indices]:
        """The calls of each group of classes, as an array with a row for each call."""
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
        """From each receive to the messages that it waits for. Messages of a pod that is not
        replayed have arrived from the start."""
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
    """The nodes of a class that join others in one of these ways, in order, by the group or channel
    (`kind`: the Python type) on which they meet."""
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
    """The dependencies of nodes of a class and the nodes that they are ordered after. Edges between
    computations are left out, since their stream orders them, and so are edges that only order
    collectives of different communicators, since these have streams of their own."""
    program = issue.program
    lengths = np.diff(program.starts)
    sources = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    targets = program.edges.astype(np.int32) - 1
    ordered = np.arange(len(targets)) >= program.control[sources]
    computes = np.zeros(len(lengths), dtype=bool)
    computes[each.computing] = True
    calls = each.where(lambda p: isinstance(p.meets, GroupAxes))
    implied = computes[sources] & computes[targets]
    implied |= ordered & calls[sources] & calls[targets]
    edges = _those(np.stack([sources, targets]), ~implied)
    joining = each.joins[each.prototype[edges[0]]] != ALONE
    last_first = _sorted(_those(edges, joining)[:, ::-1])
    return each.first + np.concatenate([last_first, _those(edges, ~joining)], axis=1)


def _stream_edges(each: ClassNodes) -> Indices:
    """From each node to the one before it on its streams, the compute stream first."""
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
    """The edges in the order of their sources."""
    return edges.take(np.argsort(edges[0], kind="stable"), axis=1)


def _those(edges: Indices, chosen: Flags) -> Indices:
    """The chosen edges."""
    return edges.compress(chosen, axis=1)


def _between(edges: Indices, first: int, last: int) -> Indices:
    """Of sorted edges, those with sources from `first` to before `last`."""
    return edges[:, slice(*np.searchsorted(edges[0], (first, last)))]
