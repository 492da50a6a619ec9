"""The data of the page of `stagec time --html`: every node of every class over the time of a step,
for JSON.

Repeated parts are stored once: a class is a sequence of pieces, each a part of an action; a piece
is a base time and the number of an `entry`; an entry has the times of nodes relative to the base.
If there are too many distinct entries, the classes with the most waiting show their computations by
kind only.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np

from stagec.analysis.memory_events import EventPlans
from stagec.program.nodes import MICROBATCH, Ints, Node, Program, marker_of
from stagec.time.clock.graph import OnStreams
from stagec.time.clock.intervals import NONE, NodeTimes, node_times, stream_name, title_of
from stagec.time.clock.residency import ResidentBytes, residency
from stagec.time.clock.times import ClassTimes, Wait
from stagec.time.path import critical_path
from stagec.time.step import Issued, StepTime
from stagec.time.streams import BUBBLE, COMPUTE, Stream

#: The largest number of nodes of all entries that are listed individually.
MOST_NODES = 400_000
#: The largest number of nodes of the classes with memory curves, and bounds for the points of these
#: curves: all together, and each.
MOST_PLANNED, ALL_POINTS, FEWEST, MOST_POINTS = 1_500_000, 48_000, 300, 3_000
#: The kinds of computations, which have colours on the page.
KINDS = ("forward", "backward", "weights", "recompute", "gradient", "optimizer")
#: The kinds of other nodes, and of waits.
COLLECTIVE, MESSAGE, COPY, WAIT = "collective", "message", "copy", "wait"
ALL_KINDS = (*KINDS, COLLECTIVE, MESSAGE, COPY, WAIT)


def time_picture(issued: Issued, step: StepTime, plans: EventPlans | None) -> dict[str, Any]:
    """The data of a page: tables of `nodes` and `entries`, and `classes` that refer to them.
    Numbers that increase are written as differences; times are picoseconds."""
    tables = _Tables()
    order = sorted(step.classes, key=lambda each: -each.busy_time(step.picoseconds))
    drawn = {each.number: _pieces(tables, each, issued.programs[each.number]) for each in order}
    memory = _memories(issued, step, order, plans)
    classes: list[dict[str, Any]] = [
        {
            "name": each.name,
            "ranks": len(issued.members[each.number]),
            "rank": int(issued.members[each.number][0]),
            "end": each.end,
            "breakdown": [[tables.part(p), t] for p, t in step.parts(each).items()],
            "pieces": drawn[each.number].pieces,
            "waits": drawn[each.number].waits,
            "memory": memory.get(each.number),
        }
        for each in step.classes
    ]
    return {
        "step": step.picoseconds,
        "kinds": ALL_KINDS,
        "streams": [stream_name(stream, issued.mesh) for stream in tables.streams],
        "parts": list(tables.parts),
        "kernels": list(tables.kernels),
        "nodes": tables.nodes,
        "entries": tables.entries,
        "microbatches": list(tables.microbatches),
        "classes": classes,
        "coarse": sorted(each.number for each in order if drawn[each.number].coarse),
        "shown": step.slowest.number,
        "path": _path(step),
    }


# -- pieces ----------------------------------------------------------------------------------------


class _ClassPieces(NamedTuple):
    """The pieces of a class, and its waits between them."""

    pieces: list[int]
    waits: list[int]
    coarse: bool


class _Tables:
    """The tables to which entries and classes refer by number."""

    def __init__(self) -> None:
        self.streams: dict[Stream, int] = {COMPUTE: 0}
        self.parts: dict[str, int] = {BUBBLE: 0}
        self.kernels: dict[str, int] = {"": 0}
        self.microbatches: dict[tuple[int, ...], int] = {(): 0}
        self.nodes: list[list[Any]] = []
        self.entries: list[list[int]] = []
        self.size = 0
        self._nodes: dict[tuple[int, tuple[Stream, ...]], int] = {}
        self._alive: list[Node] = []
        self._others: dict[tuple[Any, ...], int] = {}
        self._entries: dict[Hashable, int] = {}

    def part(self, name: str) -> int:
        return self.parts.setdefault(name, len(self.parts))

    def node(self, placed: OnStreams) -> int:
        """The number of a node on these streams."""
        node = placed.node
        key = id(node), placed.streams
        if key not in self._nodes:
            self._nodes[key] = len(self.nodes)
            self._alive.append(node)  # so that its id is not reused
            mark = marker_of(node.name)
            kind, part = ALL_KINDS.index(kind_of(node)), self.part(placed.part)
            kernel = self.kernels.setdefault(_kernel(node), len(self.kernels))
            slot = MICROBATCH.index(mark) if mark else -1
            streams = (self.streams.setdefault(s, len(self.streams)) for s in placed.streams)
            what = title_of(node.name), node.kind, kind, part, node.size, node.flops
            self.nodes.append([*what, kernel, slot, *streams])
        return self._nodes[key]

    def entry(self, rows: Sequence[tuple[int, int, int]]) -> int:
        """The number of an entry: node, start and end of each."""
        key = tuple(rows)
        if key not in self._entries:
            self._entries[key] = len(self.entries)
            flat: list[int] = []
            before = 0
            for node, start, end in rows:
                flat += (node, start - before, end - start)
                before = start
            self.entries.append(flat)
            self.size += len(rows)
        return self._entries[key]

    def several(self, kind: str, flops: int) -> int:
        """The number of a row for several computations of a kind."""
        return self._other((kind, "several", ALL_KINDS.index(kind), 0, 0, flops, 0, -1, 0))

    def wait(self, part: str) -> int:
        """The number of the row for waits that count as a part of the breakdown."""
        return self._other(("", "", ALL_KINDS.index(WAIT), self.part(part), 0, 0, 0, -1, 0))

    def _other(self, row: tuple[Any, ...]) -> int:
        if row not in self._others:
            self._others[row] = len(self.nodes)
            self.nodes.append(list(row))
        return self._others[row]


def _pieces(tables: _Tables, each: ClassTimes, program: Program) -> _ClassPieces:
    """The pieces of a class: the base of each, relative to that of the previous one, its entry and
    its microbatches. Waits within a piece are a part of its entry."""
    times, coarse = node_times(program, each), tables.size > MOST_NODES
    marks = [marker_of(placed.node.name) for placed in times.kinds]
    slots = np.array([MICROBATCH.index(m) if m else NONE for m in marks])[times.kind]
    computes = each.nodes.where(lambda placed: placed.computes)
    waits = deque(wait for wait in each.waits if wait.part != BUBBLE)
    known: dict[Hashable, int] = {}
    pieces: list[int] = []
    between: list[Wait] = []
    before = 0
    for inside in _cuts(times, slots):
        starts, ends, on = times.start[inside], times.end[inside], computes[inside]
        base = int(starts[on][0] if on.any() else starts[0])
        idle: list[tuple[int, int, int]] = []
        while waits and waits[0].end <= ends[on].max(initial=0):
            start, end, part = waits.popleft()
            if start < base:
                between.append(Wait(start, end, part))
            else:
                idle.append((tables.wait(part), start - base, end - base))
        ran = times.kind[inside], starts - base, ends - base
        key = *(column.tobytes() for column in ran), *idle
        if key not in known:
            numbers: list[int] = times.kind[inside].tolist()
            kinds = [times.kinds[i] for i in numbers]
            rows = zip(kinds, ran[1].tolist(), ran[2].tolist(), strict=True)
            spans = _segments(tables, rows) if coarse else ((tables.node(p), *t) for p, *t in rows)
            known[key] = tables.entry([*spans, *idle])
        of = _microbatches(slots[inside], times.microbatch[inside])
        microbatches = tables.microbatches.setdefault(of, len(tables.microbatches))
        pieces += (base - before, known[key], microbatches)
        before = base
    return _ClassPieces(pieces, _waits(tables, [*between, *waits]), coarse)


def _cuts(times: NodeTimes, slots: Ints) -> Iterator[slice]:
    """The pieces of a program: runs of successive kinds with the same microbatches."""
    cuts = {0, len(slots), *(np.flatnonzero(np.diff(times.kind) != 1) + 1).tolist()}
    for slot in range(len(MICROBATCH)):
        of = np.flatnonzero(slots == slot)
        cuts.update(of[1:][np.diff(times.microbatch[of]) != 0].tolist())
    return starmap(slice, pairwise(sorted(cuts)))


def _microbatches(slots: Ints, numbers: Ints) -> tuple[int, ...]:
    """The microbatches of a piece, by their slots."""
    of = dict(zip(slots.tolist(), numbers.tolist(), strict=True))
    return tuple(of.get(slot, NONE) for slot in range(max(of) + 1))


def _segments(
    tables: _Tables, times: Iterator[tuple[OnStreams, int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Merge successive computations of the same kind."""
    kind, first, last, flops = "", 0, 0, 0
    for placed, start, end in times:
        if not placed.computes:
            continue
        own = kind_of(placed.node)
        if kind and own != kind:
            yield tables.several(kind, flops), first, last
            kind = ""
        if not kind:
            kind, first, flops = own, start, 0
        last, flops = end, flops + placed.node.flops
    if kind:
        yield tables.several(kind, flops), first, last


def kind_of(node: Node) -> str:
    """The kind of a node, which determines its colour."""
    if node.is_message:
        return MESSAGE
    if node.is_copy:
        return COPY
    if node.is_collective:
        return COLLECTIVE
    if node.phase == "backward" and _action(node) == "weights":
        return "weights"
    return node.phase if node.phase in KINDS else "forward"


def _action(node: Node) -> str:
    """The kind of the schedule action of a node; '' if it has none."""
    op = node.op
    while op is not None and op.name != "et.action":
        op = op.parent.owner if op.parent is not None else None
    return "" if op is None else op.text("kind")


def _kernel(node: Node) -> str:
    """`matmul bf16 1 x 4096 x 8192 x 8192`."""
    return str(node.kernel) if node.kernel is not None and node.kernel.extents else ""


# -- waits, the path, memory -----------------------------------------------------------------------


def _waits(tables: _Tables, waits: Sequence[Wait]) -> list[int]:
    """The waits of the compute stream that are not in entries: the start of each, relative to the
    end of the previous one, its time and its part. The stream is idle in all other time without
    computations."""
    columns: list[int] = []
    before = 0
    for start, end, part in waits:
        columns += (start - before, end - start, tables.part(part))
        before = end
    return columns


def _path(step: StepTime) -> list[int]:
    """The critical path from the start of the step: the class of each stretch, and its time."""
    stretches: list[list[int]] = []
    for link in critical_path(step.classes):
        if stretches and stretches[-1][0] == link.owner.number:
            stretches[-1][1] += link.time
        else:
            stretches.append([link.owner.number, link.time])
    return [n for stretch in reversed(stretches) for n in stretch]


def _memories(
    issued: Issued, step: StepTime, order: Sequence[ClassTimes], plans: EventPlans | None
) -> Mapping[int, dict[str, Any]]:
    """The memory curves of classes, busiest first, up to `MOST_PLANNED` nodes."""
    memories: dict[int, dict[str, Any]] = {}
    if plans is None:
        return memories
    room = MOST_PLANNED
    points = min(MOST_POINTS, max(FEWEST, ALL_POINTS // max(1, len(order))))
    for each in order:
        room -= len(each)
        if memories and room < 0:
            break
        rank_class = issued.classes[each.number]
        events = plans.annotate(rank_class, rank_class.program()).events
        if events is None:
            continue
        curve = residency(events, node_times(issued.programs[each.number], each))
        curve = thinned(curve, step.picoseconds, points)
        memories[each.number] = {
            "static": events.static,
            "peak": events.peak,
            "times": _steps(curve.time.tolist()),
            "bytes": _steps(curve.bytes.tolist()),
        }
    return memories


def thinned(curve: ResidentBytes, end: int, most: int) -> ResidentBytes:
    """A curve with at most `most` points: the highest moment of each column of the time."""
    if len(curve.time) <= most:
        return curve
    edges = np.linspace(0, end, most + 1).astype(np.int64)
    edges = edges[np.searchsorted(edges, curve.time[0], side="right") - 1 :]
    firsts = np.maximum(np.searchsorted(curve.time, edges[:-1], side="right") - 1, 0)
    lasts = np.searchsorted(curve.time, edges[1:], side="left")
    ends = np.stack([firsts, lasts], axis=1).ravel()
    highest = np.maximum.reduceat(np.append(curve.bytes, 0), ends)[::2]
    return ResidentBytes(np.maximum(edges[:-1], curve.time[0]), highest)


def _steps(numbers: Sequence[int]) -> list[int]:
    """The differences of successive numbers, which are shorter to write."""
    return [b - a for a, b in pairwise([0, *numbers])]
