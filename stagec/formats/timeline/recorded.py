"""Timelines of traces with durations: those of a profiler, or of `compile --machine`.

A node with a start time is shown at that time. Traces without start times are replayed, each rank
separately: a node starts when its dependencies are complete and its stream is free, in file order.
The duration of a recorded collective includes its waiting time for other ranks, so ranks are
independent. Converters of PyTorch's traces add a control dependency of an op on its caller, which
may depend on the op in turn: if that makes a cycle, only data dependencies count, as in Chakra's
feeder.

    a  3 us   on compute          0 ..  3
    b  5 us   on group 1, after a 3 ..  8
    c  4 us   on compute          3 ..  7
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from stagec.formats.chakra.nodes import CollKind, NodeKind, TraceError, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.formats.timeline.ranks import HOST, Timeline
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Node
from stagec.support.diagnostics import error
from stagec.time.clock.graph import OnStreams
from stagec.time.clock.intervals import NONE, NodeTimes
from stagec.time.streams import COMPUTE, Stream

_PICOSECONDS = 10**6
_COPIES = {NodeKind.MEM_LOAD: ("load", "device"), NodeKind.MEM_STORE: ("store", "host")}
_PEERS = {NodeKind.SEND: ("send", "comm_dst"), NodeKind.RECV: ("recv", "comm_src")}
#: The kinds of device nodes that must have durations.
_TIMED = (NodeKind.COMP, NodeKind.COLL, NodeKind.SEND, NodeKind.RECV)


def recorded_timeline(paths: Mapping[int, Path], groups: Mapping[int, Sequence[int]]) -> Timeline:
    """The timeline of ranks from the files of their traces. `groups` are the members of each group,
    as far as they are known. Files are read on demand, which raises `DiagnosticError` for a trace
    without durations, with impossible times, or with cyclic dependencies.
    """
    sizes = {_group_name(str(n)): len(members) for n, members in groups.items()}
    mesh: defaultdict[str, int] = defaultdict(lambda: 1, sizes)

    @lru_cache(maxsize=2)
    def times(rank: int) -> NodeTimes:
        return _Rank(paths[rank], mesh).times()

    def group(node: Node, rank: int) -> tuple[str, Sequence[int]]:
        text = node.group.axes[0].removeprefix(_GROUP)
        return text, groups.get(int(text), ()) if text.isdecimal() else ()

    return Timeline(
        lambda rank: mesh,
        len(paths),
        "",
        {rank: rank for rank in paths},
        lambda rank: paths[rank].name,
        times,
        lambda rank: None,
        group,
        lambda node, rank: int(node.over.removeprefix(_RANK)),
    )


_GROUP, _RANK = "group ", "rank "


def _group_name(text: str) -> str:
    return f"{_GROUP}{text}"


@dataclass
class _Rank:
    """The trace of a rank."""

    path: Path
    mesh: Mapping[str, int]

    def times(self) -> NodeTimes:
        """The times of its nodes."""
        try:
            nodes = [n for n in read_trace(self.path) if n.kind != NodeKind.METADATA]
        except TraceError as problem:
            raise error(str(problem), remedy="give a complete trace, protobuf or JSON") from None
        self._check(nodes)
        steps = [self._step(node) for node in nodes]
        if any(node.start_micros for node in nodes):
            first = min(node.start_micros for node in nodes)
            starts = [(node.start_micros - first) * _PICOSECONDS for node in nodes]
        else:
            every = _replayed(nodes, steps, lambda n: (*n.data_deps, *n.ctrl_deps))
            replay = every or _replayed(nodes, steps, lambda n: n.data_deps)
            if replay is None:
                raise error(
                    f"{self.path}: nodes depend on each other in a cycle",
                    remedy="'stagec check' names them",
                )
            starts = replay
        order = sorted(range(len(nodes)), key=starts.__getitem__)
        start = [starts[i] for i in order]
        end = [starts[i] + nodes[i].duration_micros * _PICOSECONDS for i in order]
        if max(end, default=0) > _LONGEST:
            raise error(
                f"{self.path}: its times go on for {max(end) // 10**12:,} s, expected a step",
                remedy="write start_time_micros and duration_micros in microseconds",
            )
        tags = [_whole(nodes[i], "comm_tag") for i in order]
        columns = order, [NONE] * len(nodes), tags, start, end, [0] * len(nodes)
        return NodeTimes(steps, *(np.array(column, dtype=np.int64) for column in columns))

    def _check(self, nodes: Sequence[TraceNode]) -> None:
        """Raises `DiagnosticError` for a trace in which no node of a kind has a duration."""
        for kind in _TIMED:
            recorded = [n for n in nodes if n.kind == kind and not n.attrs.get("is_cpu_op")]
            if recorded and not any(n.duration_micros for n in recorded):
                raise error(
                    f"{self.path}: {recorded[0].label} has no duration, nor has any other "
                    f"{kind.label} node: a timeline needs them",
                    remedy="record them, or compile the model with --format kineto --machine NAME",
                )

    def _step(self, node: TraceNode) -> OnStreams:
        made, stream = self._made(node)
        return OnStreams.on(made, (stream,))

    def _made(self, node: TraceNode) -> tuple[Node, Stream]:
        """The node, and the stream that it is on."""
        phase, slash, _ = node.name.partition("/")
        phase = phase if slash else ""
        size = _whole(node, "comm_size")
        if node.attrs.get("is_cpu_op"):
            thread = f"thread {_whole(node, 'tid')}"
            return Node(HOST, node.name, phase, size or _whole(node, "tensor_size")), (HOST, thread)
        if node.kind == NodeKind.COLL:
            given = node.attrs.get("pg_name")
            axes = GroupAxes((_group_name(given if isinstance(given, str) else "0"),))
            kind = _collective(node)
            full = size * axes.size(self.mesh) if kind == "all_gather" else size
            return Node(kind, node.name, phase, full, group=axes), ("group", axes)
        if node.kind in _PEERS:
            kind, attribute = _PEERS[NodeKind(node.kind)]
            peer = f"{_RANK}{_whole(node, attribute)}"
            return Node(kind, node.name, phase, size, over=peer, by=1), (kind, peer)
        size = _whole(node, "tensor_size")
        if node.kind in _COPIES:
            kind, to = _COPIES[NodeKind(node.kind)]
            return Node(kind, node.name, phase, size, to=to), ("copy", to)
        flops = _whole(node, "num_ops")
        stream = node.attrs.get("stream", node.attrs.get("tid"))
        on: Stream = ("kernel", f"stream {stream}") if isinstance(stream, int) else COMPUTE
        return Node("comp", node.name, phase, size, flops), on


def _replayed(
    nodes: Sequence[TraceNode],
    steps: Sequence[OnStreams],
    waits_for: Callable[[TraceNode], Sequence[int]],
) -> list[int] | None:
    """The start of each node in picoseconds; None if dependencies form a cycle."""
    index = {node.id: i for i, node in enumerate(nodes)}
    users: defaultdict[int, list[int]] = defaultdict(list)
    waiting: list[int] = []
    for i, node in enumerate(nodes):
        before = {index[d] for d in waits_for(node) if d in index}
        waiting.append(len(before))
        for other in before:
            users[other].append(i)
    ready = [i for i, left in enumerate(waiting) if not left]
    heapify(ready)
    starts, free = [0] * len(nodes), defaultdict[Stream, int](int)
    done = 0
    while ready:
        i = heappop(ready)
        (stream,) = steps[i].streams
        starts[i] = max(starts[i], free[stream])
        free[stream] = starts[i] + nodes[i].duration_micros * _PICOSECONDS
        done += 1
        for user in users[i]:
            starts[user] = max(starts[user], free[stream])
            waiting[user] -= 1
            if not waiting[user]:
                heappush(ready, user)
    return starts if done == len(nodes) else None


#: A day, in picoseconds: longer times are errors.
_LONGEST = 86_400 * 10**12


def _whole(node: TraceNode, name: str) -> int:
    """The value of an integer attribute; 0 if it is missing or not a valid number."""
    value = node.attrs.get(name, 0)
    return value if isinstance(value, int) and 0 <= value < 1 << 60 else 0


def _collective(node: TraceNode) -> str:
    kind = _whole(node, "comm_type")
    return CollKind(kind).label if kind in set(CollKind) else f"collective {kind}"
