"""The program of a rank for more microbatches than were recorded.

What is recorded is decomposed into turns, and each node into what it waits for. The turns of more
microbatches are known from the schedule, so the program is put together again:

    recorded   F0 F1 B0 F2 B1 B2 sum         F, B    turns, see `stagec.traces.decomposition`
    more       F0 F1 B0 F2 B1 F3 B2 B3 sum   sum     stands behind the last B

Of a microbatch a node takes what was made for it, or else what was made last, as the compiler has
it (`stagec.program.stepper`). It is ordered behind the node before it on its stream, or behind a
computation so many before it. That this is all there is to a program is not assumed: put together
again for the recorded number of microbatches, it has to be the recorded one, node by node and edge
by edge. Where it is not, and where the recording does not say what comes next, it is refused.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from stagec.program.columns import sorted_edges, stream_edges
from stagec.program.nodes import Events, Ints, Node, Program
from stagec.support.diagnostics import error
from stagec.traces.decomposition import Decomposition, Labels, decompose, labelled
from stagec.traces.node_layout import NOTHING, Key, NodeLayout, Rule, lay_out
from stagec.traces.turns import Turn


def stream_counts(programs: Iterable[Program]) -> list[int]:
    """How many streams of messages a job may have, by the tags of its programs: a tag is the number
    of messages before it on its stream, as many times as there are streams, and its stream."""
    stride = 0
    for program in programs:
        labels = labelled(program, chunks=False)
        last: dict[int, int] = {}
        for which, tag in _messages(program, labels):
            stride = gcd(stride, tag - last.get(which, tag))
            last[which] = tag
    return [n for n in range(1, stride + 1) if stride % n == 0] or [1]


def _messages(program: Program, labels: Labels) -> list[tuple[int, int]]:
    """The prototype and the tag of each message, in order."""
    there = np.array([n.is_message for n in labels.nodes])[labels.which]
    which: list[int] = labels.which[there].tolist()
    tags: list[int] = program.tag[there].tolist()
    return [*zip(which, tags, strict=True)]


def with_turns(
    program: Program,
    recorded: Sequence[Turn],
    wanted: Sequence[Turn],
    axis: str,
    streams: Sequence[int],
    *,
    chunks: bool,
) -> Program:
    """A program that consists of the recorded turns, with the wanted ones instead. `axis` is that
    of the stages, `streams` are the numbers of streams of messages that the job may have. Raises
    `DiagnosticError` where that is not all that the program is made of."""
    decomposed = decompose(program, recorded, axis, chunks=chunks)
    before, after = (lay_out(decomposed, turns) for turns in (recorded, wanted))
    wrong = None
    programs: list[Program] = []
    for by in ("made", "name"):
        for nodes in _with_blocking(program, before):
            learnt = _learnt(program, before, nodes, streams, by)
            differs = _differ(program, decomposed, learnt.program(before))
            if differs is None:
                programs.append(learnt.program(after))
            wrong = differs if wrong is None else wrong
        if programs:
            break
    if wrong is not None and not programs:
        raise error(
            f"'{decomposed.labels.name(wrong)}' has other dependencies, or another tag, than the "
            "schedule and the microbatches before it give",
            remedy="compile the larger job with stagec instead",
        )
    if _differ(programs[0], decomposed, programs[-1]) is not None:
        raise error(
            "too few microbatches to see which computations wait for a collective",
            remedy="record a step with more microbatches",
        )
    return programs[0]


def _differ(program: Program, decomposed: Decomposition, again: Program) -> int | None:
    """The first node, counted from 0, that waits for others or has another tag; None if there is
    none. The nodes are the same."""
    same = program.tag == again.tag
    sizes = [np.diff(p.starts) for p in (program, again)]
    data = [p.control - p.starts[:-1] for p in (program, again)]
    same &= (sizes[0] == sizes[1]) & (data[0] == data[1])
    if same.all() and np.array_equal(program.edges, again.edges):
        return None
    if same.all():
        edge = int(np.flatnonzero(program.edges != again.edges)[0])
        return int(np.searchsorted(program.starts, edge, side="right")) - 1
    return int(np.flatnonzero(~same)[0])


# -- what nodes wait for ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Waits:
    """What a node takes data from, and what it is ordered behind beside its stream."""

    data: Sequence[Rule] = ()
    order: Sequence[Rule] = ()


@dataclass(frozen=True)
class _Learnt:
    """What all nodes of a role wait for, the stream of each message by the number of streams, and
    the memory of each node: of its role's first, last and other ones."""

    name: str
    decomposed: Decomposition
    nodes: Sequence[Node]
    waits: dict[Key, _Waits]
    streams: dict[int, dict[int, int]]
    memory: dict[tuple[Key, str], tuple[int, int]] | None
    static: int

    def program(self, layout: NodeLayout) -> Program:
        """The program of nodes in this order. Raises `DiagnosticError` if what was recorded does
        not say it."""
        sources, targets, control = list[Ints](), list[Ints](), list[Ints]()
        for key, mine in layout.keys.items():
            waits = self.waits.get(key, _Waits())
            rules = [(rule, 0) for rule in waits.data] + [(rule, 1) for rule in waits.order]
            for rule, ordered in rules:
                target = layout.targets(rule, mine)
                there = target != NOTHING
                sources.append(mine[there])
                targets.append(target[there])
                control.append(np.full(int(there.sum()), ordered))
        streams = stream_edges(self.nodes, layout.which)
        starts, middle, edges = sorted_edges(
            len(layout.role),
            np.concatenate([*sources, streams[0]]),
            np.concatenate([*targets, streams[1]]),
            np.concatenate([*control, np.ones(len(streams[0]), dtype=np.int64)]),
        )
        columns = layout.which, np.maximum(layout.microbatch, 0), self._tags(layout)
        events = self._events(layout)
        nodes = self.decomposed.labels.nodes
        return Program(self.name, nodes, *columns, starts, middle, edges, events)

    def _tags(self, layout: NodeLayout) -> Ints:
        messages = np.array([n.is_message for n in self.nodes])
        there = np.flatnonzero(messages[layout.which])
        which: list[int] = layout.which[there].tolist()
        tags_of: list[list[int]] = []
        for count, stream in self.streams.items():
            sent: Counter[tuple[str, int]] = Counter()
            tags: list[int] = []
            for number in which:
                channel = self.nodes[number].kind, stream[number]
                tags.append(stream[number] + count * sent[channel])
                sent[channel] += 1
            tags_of.append(tags)
        if any(tags != tags_of[0] for tags in tags_of[1:]):
            raise error(
                "the number of streams cannot be read from the tags of messages",
                remedy="record a step with more microbatches",
            )
        result = np.zeros(len(layout.role), dtype=np.int64)
        if tags_of:
            result[there] = tags_of[0]
        return result

    def _events(self, layout: NodeLayout) -> Events | None:
        if self.memory is None:
            return None
        columns = np.zeros((2, len(layout.role)), dtype=np.int64)
        for key, place, nodes in _by_place(layout):
            if (key, place) not in self.memory:
                raise error(
                    "the traces have no microbatch between the first and the last, whose memory "
                    "is needed",
                    remedy="record three microbatches or more",
                )
            columns[:, nodes - 1] = np.array(self.memory[key, place])[:, None]
        return Events(self.static, *columns)


def _by_place(layout: NodeLayout) -> Iterable[tuple[Key, str, Ints]]:
    """The nodes of each key that are the first of their role, the last, or neither."""
    for key, nodes in layout.keys.items():
        every = layout.of_role.get(key[1], nodes)
        first, last = nodes == every[0], nodes == every[-1]
        for place, there in (
            ("only", first & last),
            ("first", first & ~last),
            ("last", last & ~first),
            ("other", ~first & ~last),
        ):
            if there.any():
                yield key, place, nodes[there]


def _learnt(
    program: Program, layout: NodeLayout, nodes: Sequence[Node], streams: Sequence[int], by: str
) -> _Learnt:
    """What a program teaches whose prototypes say which collectives block. What a node takes is
    known `by` the role that it was made in, or by the name of that: backwards with the gradients
    of their weights, and without them, may be nodes of one name and other sizes."""
    edges = stream_edges(nodes, layout.which)
    wide = len(program) + 1
    by_stream = edges[0] * wide + edges[1]
    sources = np.repeat(np.arange(1, wide), np.diff(program.starts))
    ordered = np.arange(len(program.edges)) >= np.repeat(program.control, np.diff(program.starts))
    said = ordered & np.isin(sources * wide + program.edges, by_stream)
    rows = zip(
        sources[~said].tolist(), program.edges[~said].tolist(), ordered[~said].tolist(), strict=True
    )
    data: defaultdict[int, list[Rule]] = defaultdict(list)
    order: defaultdict[int, list[Rule]] = defaultdict(list)
    computes = np.zeros(wide, dtype=np.int64)
    computes[layout.computations] = 1
    rank = np.cumsum(computes)
    for source, target, is_order in rows:
        if is_order and computes[target]:
            back = int(rank[source - 1] - rank[target] + 1)
            order[source].append(("back", back))
            continue
        role, number = int(layout.role[target - 1]), int(layout.fixed[target - 1])
        rule = (by, role) if role >= 0 else ("fixed", number)
        (order if is_order else data)[source].append(rule)
    waits: dict[Key, _Waits] = {}
    for source in sorted({*data, *order}):
        key = layout.key(source)
        known, mine = waits.get(key, _Waits()), data.get(source, ())
        waits[key] = _Waits(
            mine if len(mine) > len(known.data) else known.data,
            [*dict.fromkeys([*known.order, *order.get(source, ())])],
        )
    memory = _memory(program, layout)
    static = program.events.static if program.events is not None else 0
    of_count = _streams(program, layout.decomposed.labels, streams)
    return _Learnt(program.name, layout.decomposed, nodes, waits, of_count, memory, static)


def _with_blocking(program: Program, layout: NodeLayout) -> Iterator[list[Node]]:
    """The prototypes with those collectives that block: a blocking one waits for the computation
    before it, and the next one for it. Where that takes its data, or another collective stands
    between, it does not show: first all that may block do, then those alone that must."""
    nodes, blocking = layout.decomposed.labels.nodes, _Blocking(program, layout)
    may = blocking.may_block()
    for which in (may, blocking.must_block(may)):
        yield [replace(n, blocking=i in which) for i, n in enumerate(nodes)]


class _Blocking:
    """The collectives of a program and the computations around them."""

    def __init__(self, program: Program, layout: NodeLayout) -> None:
        self._computations = layout.computations
        self._which: list[int] = layout.which.tolist()
        starts, control = program.starts.tolist(), program.control.tolist()
        ranges = zip(starts[:-1], control, starts[1:], strict=True)
        self._waits = [(program.edges[a:b], program.edges[b:c]) for a, b, c in ranges]
        kinds = {i for i, n in enumerate(layout.decomposed.labels.nodes) if n.is_collective}
        self._nodes = [i + 1 for i, which in enumerate(self._which) if which in kinds]
        self._before: list[int] = np.searchsorted(self._computations, self._nodes).tolist()

    def may_block(self) -> set[int]:
        """The prototypes that block unless one of their nodes shows that they do not."""
        numbers = {self._which[node - 1] for node in self._nodes}
        numbers -= {
            self._which[node - 1]
            for node, at in zip(self._nodes, self._before, strict=True)
            if at and not any(int(self._computations[at - 1]) in w for w in self._waits[node - 1])
        }
        while wrong := {which for which, data, order in self._last(numbers) if not data | order}:
            numbers -= wrong
        return numbers

    def must_block(self, numbers: set[int]) -> set[int]:
        """Those that a node shows to block."""
        return {which for which, data, order in self._last(numbers) if order and not data}

    def _last(self, numbers: set[int]) -> Iterator[tuple[int, bool, bool]]:
        """The last of these before each computation, and whether that takes its data, and whether
        it is ordered behind it."""
        last = len(self._computations)
        for node, at in zip(reversed(self._nodes), reversed(self._before), strict=True):
            which = self._which[node - 1]
            if which in numbers and at < last:
                last = at
                data, order = self._waits[int(self._computations[at]) - 1]
                yield which, node in data, node in order


def _streams(program: Program, labels: Labels, counts: Sequence[int]) -> dict[int, dict[int, int]]:
    """The stream of each prototype of messages, by each number of streams that fits the tags: those
    of a stream are numbered without gaps. Raises `DiagnosticError` if none fits."""
    nodes, streams = labels.nodes, dict[int, dict[int, int]]()
    messages = _messages(program, labels)
    for count in counts:
        stream: dict[int, int] = {}
        sent: Counter[tuple[str, int]] = Counter()
        for which, tag in messages:
            channel = nodes[which].kind, tag % count
            if (
                tag // count != sent[channel]
                or stream.setdefault(which, tag % count) != tag % count
            ):
                break
            sent[channel] += 1
        else:
            streams[count] = stream
    if not streams:
        raise error(
            "the tags of messages do not count up on each stream",
            remedy="compile the larger job with stagec instead",
        )
    return streams


def _memory(program: Program, layout: NodeLayout) -> dict[tuple[Key, str], tuple[int, int]] | None:
    """The bytes of nodes by key and place. Raises `DiagnosticError` if alike nodes differ."""
    events = program.events
    if events is None:
        return None
    changes: dict[tuple[Key, str], tuple[int, int]] = {}
    for key, place, nodes in _by_place(layout):
        rows = np.stack([events.alloc[nodes - 1], events.free[nodes - 1]])
        if (rows != rows[:, :1]).any():
            name = layout.decomposed.labels.name(int(nodes[-1]) - 1)
            raise error(
                f"microbatches allocate different numbers of bytes, first at '{name}'",
                remedy="compile the larger job with stagec instead",
            )
        changes[key, place] = int(rows[0, 0]), int(rows[1, 0])
    return changes
