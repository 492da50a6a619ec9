"""What the page of `stagec time --html` draws: every node of every class over the time of a step,
as plain data for JSON.

What is the same again and again is said once, as in the replay: a class is a row of pieces, a piece
a base and the number of an `entry`, an entry the times of nodes after the base. Of a job with far
too many distinct entries, those of the classes that wait most tell their computations by kind only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stagec.analysis.memory_events import EventPlans
from stagec.program.nodes import MICROBATCH, Node, marker_of
from stagec.program.runs import Run
from stagec.time.clock.held import HeldBytes, held
from stagec.time.clock.intervals import (
    inner_waits,
    node_times,
    occurrences,
    stream_name,
    title_of,
    waits,
)
from stagec.time.clock.replay import ClassReplay
from stagec.time.clock.shapes import ShapeNode
from stagec.time.path import critical_path
from stagec.time.step import Issued, StepTime
from stagec.time.streams import BUBBLE, COMPUTE, Stream

#: Nodes of all entries together, of which a page says each.
MOST_NODES = 400_000
#: Nodes of the classes together of which a page shows the memory, and points of all these curves.
MOST_PLANNED, ALL_POINTS, FEWEST, MOST_POINTS = 1_500_000, 48_000, 300, 3_000
#: What a computation is for, as the page colours it.
KINDS = ("forward", "backward", "weights", "recompute", "gradient", "optimizer")
#: What runs beside computations.
COLLECTIVE, MESSAGE, COPY, WAIT = "collective", "message", "copy", "wait"
ALL_KINDS = (*KINDS, COLLECTIVE, MESSAGE, COPY, WAIT)


def time_picture(issued: Issued, step: StepTime, plans: EventPlans | None) -> dict[str, Any]:
    """The data of a page: tables of `nodes` and `entries`, and `classes` that refer to them.
    Numbers that increase are written as differences; times are picoseconds."""
    tables = _Tables()
    order = sorted(step.classes, key=lambda each: -each.busy_time(step.picoseconds))
    drawn = {each.number: _pieces(tables, each, issued.runs[each.number]) for each in order}
    memory = _memories(issued, step, order, plans)
    classes: list[dict[str, Any]] = [
        {
            "name": each.name,
            "ranks": len(issued.members[each.number]),
            "rank": int(issued.members[each.number][0]),
            "end": each.end,
            "breakdown": [[tables.part(p), t] for p, t in step.parts(each).items()],
            "pieces": drawn[each.number].pieces,
            "waits": _waits(tables, each, step.picoseconds),
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


class _Drawn(NamedTuple):
    pieces: list[int]
    coarse: bool


class _Tables:
    """What entries and classes refer to by number."""

    def __init__(self) -> None:
        self.streams: dict[Stream, int] = {COMPUTE: 0}
        self.parts: dict[str, int] = {BUBBLE: 0}
        self.kernels: dict[str, int] = {"": 0}
        self.microbatches: dict[tuple[int, ...], int] = {(): 0}
        self.nodes: list[list[Any]] = []
        self.entries: list[list[int]] = []
        self.size = 0
        self._nodes: dict[tuple[int, tuple[Stream, ...]], int] = {}
        self._kept: list[Node] = []
        self._others: dict[tuple[Any, ...], int] = {}
        self._entries: dict[Hashable, int] = {}

    def part(self, name: str) -> int:
        return self.parts.setdefault(name, len(self.parts))

    def node(self, step: ShapeNode) -> int:
        """The number of a node on these streams."""
        node = step.node
        key = id(node), step.streams
        if key not in self._nodes:
            self._nodes[key] = len(self.nodes)
            self._kept.append(node)  # so that no other one has its id
            mark = marker_of(node.name)
            self.nodes.append(
                [
                    title_of(node.name),
                    node.kind,
                    ALL_KINDS.index(kind_of(node)),
                    self.part(step.part),
                    node.size,
                    node.flops,
                    self.kernels.setdefault(_kernel(node), len(self.kernels)),
                    MICROBATCH.index(mark) if mark else -1,
                    *(self.streams.setdefault(s, len(self.streams)) for s in step.streams),
                ]
            )
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
        """The number of computations of a kind that are told as one."""
        return self._made((kind, "several", ALL_KINDS.index(kind), 0, 0, flops, 0, -1, 0))

    def wait(self, part: str) -> int:
        """The number of what stands for waits that count as a part."""
        return self._made(("", "", ALL_KINDS.index(WAIT), self.part(part), 0, 0, 0, -1, 0))

    def _made(self, row: tuple[Any, ...]) -> int:
        if row not in self._others:
            self._others[row] = len(self.nodes)
            self.nodes.append(list(row))
        return self._others[row]


def _pieces(tables: _Tables, each: ClassReplay, runs: Sequence[Run]) -> _Drawn:
    """The pieces of a class: the base of each, less that of the one before, its entry and its
    microbatches."""
    coarse = tables.size > MOST_NODES
    known: dict[Hashable, int] = {}
    found: list[int] = []
    before = 0
    for number, inside, run in occurrences(runs, each):
        shape, entry = each.plan[number].shape, each.entries[number]
        what: Hashable = (shape, each.ends[number][0]) if entry is None else entry
        key = what, inside.start, inside.stop
        if key not in known:
            steps, ends = shape.steps[inside], each.ends[number][inside]
            starts = [0] * len(steps) if entry is None else entry.starts[inside]
            times = zip(steps, starts, ends, strict=True)
            if coarse:
                rows = list(_segments(tables, times))
            else:
                rows = [(tables.node(step), start, end) for step, start, end in times]
            idle = inner_waits(shape, entry) if entry is not None and not inside.start else ()
            rows += [(tables.wait(w.part), w.start, w.end) for w in idle]
            known[key] = tables.entry(rows)
        numbers = tuple(run.instance.microbatches) if run.instance is not None else ()
        microbatches = tables.microbatches.setdefault(numbers, len(tables.microbatches))
        base = each.bases[number]
        found += (base - before, known[key], microbatches)
        before = base
    return _Drawn(found, coarse)


def _segments(
    tables: _Tables, times: Iterator[tuple[ShapeNode, int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Computations of one kind that follow each other, as one."""
    kind, first, last, flops = "", 0, 0, 0
    for step, start, end in times:
        if not step.computes:
            continue
        mine = kind_of(step.node)
        if kind and mine != kind:
            yield tables.several(kind, flops), first, last
            kind = ""
        if not kind:
            kind, first, flops = mine, start, 0
        last, flops = end, flops + step.node.flops
    if kind:
        yield tables.several(kind, flops), first, last


def kind_of(node: Node) -> str:
    """What the page colours a node as."""
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
    """The kind of the action of a schedule that a node is a part of, '' if of none."""
    op = node.op
    while op is not None and op.name != "et.action":
        op = op.parent.owner if op.parent is not None else None
    return "" if op is None else op.text("kind")


def _kernel(node: Node) -> str:
    """`matmul bf16 1 x 4096 x 8192 x 8192`."""
    kernel = node.kernel
    if kernel is None or not kernel.extents:
        return ""
    return f"{kernel.kind} {kernel.dtype} {' x '.join(map(str, kernel.extents))}"


# -- waits, the path, memory -----------------------------------------------------------------------


def _waits(tables: _Tables, each: ClassReplay, step: int) -> list[int]:
    """What the compute stream waits for beside what entries say: the start of each, less the end of
    the one before, its time and its part. It idles in the rest of the time that it does not
    compute."""
    found: list[int] = []
    before = 0
    for wait in waits(each, step, inside=False):
        if wait.part != BUBBLE:
            found += (wait.start - before, wait.end - wait.start, tables.part(wait.part))
            before = wait.end
    return found


def _path(step: StepTime) -> list[int]:
    """The critical path from the start of the step on: the class of each stretch, and its time."""
    stretches: list[list[int]] = []
    for link in critical_path(step):
        if stretches and stretches[-1][0] == link.owner.number:
            stretches[-1][1] += link.time
        else:
            stretches.append([link.owner.number, link.time])
    return [n for stretch in reversed(stretches) for n in stretch]


def _memories(
    issued: Issued, step: StepTime, order: Sequence[ClassReplay], plans: EventPlans | None
) -> Mapping[int, dict[str, Any]]:
    """What classes hold, the busiest first, as far as there is time to find out."""
    found: dict[int, dict[str, Any]] = {}
    if plans is None:
        return found
    room = MOST_PLANNED
    points = min(MOST_POINTS, max(FEWEST, ALL_POINTS // max(1, len(order))))
    for each in order:
        room -= sum(len(planned.shape.steps) for planned in each.plan)
        if found and room < 0:
            break
        rank_class = issued.classes[each.number]
        events = plans.annotate(rank_class, rank_class.program()).events
        if events is None:
            continue
        curve = held(events, node_times(issued.runs[each.number], each))
        curve = thinned(curve, step.picoseconds, points)
        found[each.number] = {
            "static": events.static,
            "peak": events.peak,
            "times": _steps(curve.time.tolist()),
            "bytes": _steps(curve.bytes.tolist()),
        }
    return found


def thinned(curve: HeldBytes, end: int, most: int) -> HeldBytes:
    """A curve of `most` points at most: of each column of the time the highest moment."""
    if len(curve.time) <= most:
        return curve
    edges = np.linspace(0, end, most + 1).astype(np.int64)
    edges = edges[np.searchsorted(edges, curve.time[0], side="right") - 1 :]
    firsts = np.maximum(np.searchsorted(curve.time, edges[:-1], side="right") - 1, 0)
    lasts = np.searchsorted(curve.time, edges[1:], side="left")
    ends = np.stack([firsts, lasts], axis=1).ravel()
    highest = np.maximum.reduceat(np.append(curve.bytes, 0), ends)[::2]
    return HeldBytes(np.maximum(edges[:-1], curve.time[0]), highest)


def _steps(numbers: Sequence[int]) -> list[int]:
    """Each number less the one before it, which are shorter to write."""
    return [b - a for a, b in pairwise([0, *numbers])]
