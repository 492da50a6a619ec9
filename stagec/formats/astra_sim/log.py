"""Reads ASTRA-sim's log: the end of each rank, and the start and end of each node of a rank.

Each moment of a rank counts as computation if one runs, otherwise as the collective or send in
progress (there is at most one), otherwise as the messages that it waits for, otherwise as idle:

    computation   ####....####          all_reduce over tp: 2 exposed
    all_reduce    ..####......          recv over pp:       1 exposed
    recv          ######.#....          idle:               1
    belongs to    CCCCAAR.CCCC          (R: the receive alone)
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagec.formats.chakra.nodes import CollKind, NodeKind, TraceNode

_END = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles, exposed communication (\d+) cycles")
_PEAK = re.compile(r"sys\[(\d+)\] peak memory usage: ([\d.]+) ([KMGT]?B)")
_NODE = re.compile(r"(issue|callback),sys->id=(\d+), tick=(\d+), node->id=(\d+),")
#: The start and end of a period, in nanoseconds.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The time when a rank ends, and the part of it without computation (`exposed`), in
    nanoseconds."""

    rank: int
    end: int
    exposed: int


@dataclass(frozen=True, slots=True)
class Exposed:
    """Communication of one kind over a group, on one rank: the number of calls, their bytes, the
    nanoseconds that they take, and those during which nothing else happens."""

    kind: str
    over: str
    calls: int
    bytes: int
    busy: int
    exposed: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The breakdown of a rank's time, in nanoseconds; the parts add up to its end."""

    computation: int
    exposed: Sequence[Exposed]
    idle: int


def rank_ends(text: str) -> dict[int, RankEnd]:
    """The ends of the ranks that finish, by rank."""
    ends = (RankEnd(*map(int, match.groups())) for match in _END.finditer(text))
    return {each.rank: each for each in ends}


def peaks(text: str) -> dict[int, str]:
    """The peak of local memory of each rank, as reported: with two decimals and a binary unit."""
    return {int(m[1]): f"{m[2]} {m[3]}" for m in _PEAK.finditer(text)}


def spans_of(lines: Iterable[str], rank: int) -> dict[int, Span]:
    """The period of each node of a rank, by node. Raises ValueError for an end without a start."""
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
    """The breakdown of a rank's time until `end`. `over` has the axes of each group.

    Raises ValueError for a node without a period.
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
    """The union of periods, as disjoint periods in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _outside(spans: Sequence[Span], end: int, start: int = 0) -> list[Span]:
    """The gaps between disjoint periods, from `start` to `end`."""
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
    """The intersection of two sequences of disjoint periods in order."""
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
