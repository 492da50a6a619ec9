"""What ASTRA-sim reports: when each rank ends, and when each node of a rank starts and ends.

A moment of a rank belongs to the computation that runs, else to the collective or the send that is
under way (there is one at a time), else to the messages that it waits for, else it is idle:

    computation   ####....####          all_reduce over tp: 2 exposed
    all_reduce    ..####......          recv over pp:       1 exposed
    recv          ######.#....          idle:               1
    belongs to    CCCCAAR.CCCC          (R: the receive alone)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagec.formats.chakra.nodes import CollKind, NodeKind, TraceNode

_END = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles, exposed communication (\d+) cycles")
_PEAK = re.compile(r"sys\[(\d+)\] peak memory usage: ([\d.]+) ([KMGT]?B)")
_NODE = re.compile(r"(issue|callback),sys->id=(\d+), tick=(\d+), node->id=(\d+),")
#: A start and an end in nanoseconds.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """When a rank ends, and how long it does not compute until then, in nanoseconds."""

    rank: int
    end: int
    exposed: int


@dataclass(frozen=True, slots=True)
class Exposed:
    """Communication of one kind over a group, on one rank: how often, bytes, nanoseconds under way,
    and those during which nothing else happens."""

    kind: str
    over: str
    calls: int
    bytes: int
    busy: int
    exposed: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of a rank goes, in nanoseconds; the parts add up to its end."""

    computation: int
    exposed: Sequence[Exposed]
    idle: int


def rank_ends(text: str) -> dict[int, RankEnd]:
    """The ranks that end, by rank."""
    ends = (RankEnd(*map(int, match.groups())) for match in _END.finditer(text))
    return {each.rank: each for each in ends}


def peaks(text: str) -> dict[int, str]:
    """The peak of local memory of each rank, as it is reported: two decimals of a binary unit."""
    return {int(m[1]): f"{m[2]} {m[3]}" for m in _PEAK.finditer(text)}


def spans_of(lines: Iterable[str], rank: int) -> dict[int, Span]:
    """Start and end of each node of a rank, by node. Raises ValueError for an end without a
    start."""
    started: dict[int, int] = {}
    spans: dict[int, Span] = {}
    mark = f"sys->id={rank},"
    for line in lines:
        if mark not in line:
            continue
        match = _NODE.search(line)
        if match is None:
            continue
        tick, node = int(match[3]), int(match[4])
        if match[1] == "issue":
            started[node] = tick
        elif node not in started:
            raise ValueError(f"node {node} of rank {rank} ends before it starts")
        else:
            spans[node] = started[node], tick
    return spans


def breakdown(
    nodes: Iterable[TraceNode], spans: Mapping[int, Span], over: Mapping[int, str], end: int
) -> Breakdown:
    """Where the time of a rank until `end` goes. `over` are the axes of each group.

    Raises ValueError for a node without a time.
    """
    computed: list[Span] = []
    sent: list[tuple[Span, tuple[str, str]]] = []
    received: list[Span] = []
    facts: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        if node.id not in spans:
            raise ValueError(f"{node.label} has no start or end time")
        span = spans[node.id]
        if node.kind == NodeKind.COMP:
            computed.append(span)
            continue
        what = _what(node, over)
        row = facts.setdefault(what, [0, 0, 0, 0])
        size = node.attrs.get("comm_size", node.attrs.get("tensor_size", 0))
        row[0] += 1
        row[1] += size if isinstance(size, int) else 0
        row[2] += span[1] - span[0]
        if node.kind == NodeKind.RECV:
            received.append(span)
        else:
            sent.append((span, what))
    gaps = _outside(_union(computed), end)
    for span, what in sent:
        facts[what][3] += _length(_common(gaps, [span]))
    left = [g for gap in gaps for g in _outside(_union([s for s, _ in sent]), gap[1], gap[0])]
    waiting = _length(_common(left, _union(received)))
    for what, row in facts.items():
        if what[0] == "recv":
            row[3] = waiting
    rows = [Exposed(*what, *row) for what, row in facts.items()]
    busy = end - _length(gaps)
    idle = end - busy - sum(row.exposed for row in rows)
    return Breakdown(busy, sorted(rows, key=lambda r: (-r.exposed, r.kind, r.over)), idle)


def _what(node: TraceNode, over: Mapping[int, str]) -> tuple[str, str]:
    if node.kind == NodeKind.COLL:
        kind = CollKind(int(str(node.attrs["comm_type"]))).label
        return kind, over.get(int(str(node.attrs["pg_name"])), "")
    return NodeKind(node.kind).label, ""


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same moments, as disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _outside(spans: Sequence[Span], end: int, start: int = 0) -> list[Span]:
    """What is between disjoint spans, from `start` to `end`."""
    gaps: list[Span] = []
    for first, last in spans:
        if last <= start:
            continue
        if first >= end:
            break
        if first > start:
            gaps.append((start, first))
        start = last
    if start < end:
        gaps.append((start, end))
    return gaps


def _common(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    """What is in both; each has disjoint spans, in order."""
    common: list[Span] = []
    at = 0
    for start, end in theirs:
        while at < len(ours) and ours[at][1] <= start:
            at += 1
        here = at
        while here < len(ours) and ours[here][0] < end:
            common.append((max(start, ours[here][0]), min(end, ours[here][1])))
            here += 1
    return common


def _length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)
