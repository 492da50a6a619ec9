"""Traces as the profiler of PyTorch (Kineto) writes them: one JSON file per rank.

A node becomes an op of the host, its launch, and a kernel, memory copy or NCCL kernel. The launch
is the gap before a kernel; the model of `stagec time` has no queue, so it ends when the kernel
begins. Communication has its group, bytes and type in the form of NCCL's kernels, which
HolisticTraceAnalysis and `stagec measure` read.

    cpu_op         forward/L0/q    0.000000 .. 2.500000     on a thread of the host
    cuda_runtime   cudaLaunchKernel                         the same time; correlation 7
    kernel         matmul bf16 ..  2.500000 .. 44.100000    on a stream of the device; correlation 7

The events of a class are made once; ranks differ in groups and peers.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

from stagec.formats.base import TraceJob
from stagec.formats.timeline.chrome import arguments
from stagec.formats.timeline.ranks import (
    HOST,
    ShownRank,
    Timeline,
    TimelineFormat,
    microseconds,
    streams_in,
)
from stagec.formats.torch_comm import NCCL, elements_of
from stagec.program.nodes import Ints, Node
from stagec.time.clock.intervals import NONE, stream_name, title_of

#: The most ranks of a group that PyTorch lists.
_MOST_RANKS = 30
#: The number of the first stream of a device, as in PyTorch.
_FIRST_STREAM = 7
#: The process of the host, its thread that launches computations, and the one that launches others.
_HOST, _COMPUTES, _COMMUNICATES = 1, 1, 2
#: A placeholder in the events of a class for the group or peers of a node.
_Hole = Node
_Parts = list[bytes | _Hole]


@dataclass(frozen=True)
class KinetoFormat(TimelineFormat):
    """Kineto's traces, compressed with `gzip`."""

    gzip: bool = False
    name: ClassVar[str] = "kineto"
    node_bytes: ClassVar[int] = 700
    one_file: ClassVar[bool] = False

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[tuple[str, Iterable[bytes]]]:
        timeline = self.timeline(job, ranks)
        writer = KinetoWriter(timeline, job.layout.groups.table())
        for rank in timeline.chosen:
            name = f"{job.name}.{rank}.json" + ".gz" * self.gzip
            yield name, _packed(writer.rank(rank), packs=self.gzip)


def _packed(parts: Iterable[bytes], *, packs: bool) -> Iterable[bytes]:
    return [gzip.compress(b"".join(parts), 6, mtime=0)] if packs else parts


class KinetoWriter:
    """Writes the ranks of a timeline; `groups` are all groups of the job, by name."""

    def __init__(self, timeline: Timeline, groups: Mapping[str, list[int]]) -> None:
        self._timeline, self._groups = timeline, groups
        self._parts = lru_cache(maxsize=2)(partial(_class_parts, timeline))

    def rank(self, rank: int) -> Iterator[bytes]:
        """The trace of a rank, in parts."""
        parts: _Parts = self._parts(self._timeline.chosen[rank])
        return _rank(self._timeline, self._timeline.trace(rank), parts, self._groups)


def _rank(
    timeline: Timeline, each: ShownRank, parts: _Parts, groups: Mapping[str, list[int]]
) -> Iterator[bytes]:
    rank = each.rank
    own = {name: ranks for name, ranks in groups.items() if rank in ranks}
    config = [
        {"pg_name": n, "pg_desc": n, "backend_config": "cuda:nccl", "pg_size": len(r), "ranks": r}
        for n, r in own.items()
    ]
    head = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": timeline.ranks,
            "pg_count": len(config),
            "pg_config": config,
        },
        "deviceProperties": [{"id": 0, "name": timeline.device}],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    yield json.dumps(head)[:-1].encode() + b', "traceEvents": [\n'
    yield ",\n".join(_about(timeline, each)).encode()
    known: dict[object, bytes] = {}
    for part in parts:
        if isinstance(part, bytes):
            yield part
            continue
        key = (part.group, part.over, part.by, part.kind if part.is_message else "")
        if key not in known:
            known[key] = _differing(timeline, part, rank).encode()
        yield known[key]
    yield b"\n]}\n"


def _about(timeline: Timeline, each: ShownRank) -> Iterator[str]:
    def named(what: str, process: int, name: str, thread: int = 0) -> str:
        args = {"name": name}
        return json.dumps({"ph": "M", "name": what, "pid": process, "tid": thread, "args": args})

    yield named("process_name", _HOST, f"rank {each.rank} ({each.name})")
    yield named("process_name", 0, f"device of rank {each.rank}")
    yield named("thread_name", _HOST, "computations", _COMPUTES)
    yield named("thread_name", _HOST, "communication", _COMMUNICATES)
    for number, stream in enumerate(streams_in(each.times), start=_FIRST_STREAM):
        name = stream_name(stream, timeline.mesh(timeline.chosen[each.rank]))
        yield named("thread_name", _HOST if name.startswith(HOST) else 0, name, number)


def _differing(timeline: Timeline, node: Node, rank: int) -> str:
    """The arguments of a communication kernel that differ between ranks: the group, or the two ends
    of a message."""
    if node.is_message:
        peer = timeline.peer(node, rank)
        name, ranks = f"{rank}:{peer}", sorted((rank, peer))
    else:
        name, group = timeline.group(node, rank)
        ranks = [*group]
    members = ", ".join(map(str, ranks[:_MOST_RANKS])) + (
        ", ..." if len(ranks) > _MOST_RANKS else ""
    )
    return (
        f'"Process Group Name": {json.dumps(name)}, "Process Group Ranks": "[{members}]", '
        f'"Group size": {len(ranks)}'
    )


def _class_parts(timeline: Timeline, number: int) -> _Parts:
    """The events of a class, each after a comma and a line break."""
    times, mesh = timeline.times(number), timeline.mesh(number)
    streams = {s: _FIRST_STREAM + i for i, s in enumerate(streams_in(times))}
    bodies: dict[int, tuple[str, str, str]] = {}
    parts: _Parts = []
    waiting: list[str] = []
    end = int(times.end.max(initial=0))
    waiting.append(
        f',\n{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": {_HOST}, '
        f'"tid": {_COMPUTES}, "ts": 0.000000, "dur": {microseconds(end)}}}'
    )
    for at, (step, microbatch, _, start, stop, launch) in enumerate(times.rows(), start=1):
        node = step.node
        if node.kind == HOST:
            waiting.append(
                f',\n{{"ph": "X", "cat": "cpu_op", "name": {json.dumps(node.name)}, '
                f'"pid": {_HOST}, "tid": {streams[step.streams[0]]}, "ts": {microseconds(start)}, '
                f'"dur": {microseconds(stop - start)}, "args": {{"External id": {at}}}}}'
            )
            continue
        if id(step) not in bodies:
            bodies[id(step)] = _bodies(node)
        op, launched, body = bodies[id(step)]
        thread = _COMPUTES if node.is_computation else _COMMUNICATES
        gap = f'"ts": {microseconds(start)}, "dur": {microseconds(launch)}'
        host = f'"pid": {_HOST}, "tid": {thread}, {gap}'
        stream = streams[step.streams[-1]]
        of = "" if microbatch == NONE else f', "microbatch": {microbatch}'
        begun = start + launch
        waiting.append(
            f',\n{{"ph": "X", {op}, {host}, "args": {{"External id": {at}{of}}}}},\n'
            f'{{"ph": "X", {launched}, {host}, "args": {{"External id": {at}, '
            f'"correlation": {at}}}}},\n{{"ph": "X", {body}"pid": 0, "tid": {stream}, '
            f'"ts": {microseconds(begun)}, "dur": {microseconds(stop - begun)}, "args": {{'
            f'"External id": {at}, "correlation": {at}, "device": 0, "context": 1, '
            f'"stream": {stream}, {_arguments(node, mesh)}'
        )
        if node.is_collective or node.is_message:
            parts += ["".join(waiting).encode(), node]
            waiting = []
        waiting.append("}}")
    parts.append("".join(waiting).encode())
    return parts


def _bodies(node: Node) -> tuple[str, str, str]:
    """The names and categories of a node's op, launch and kernel."""
    title = json.dumps(title_of(node.name))
    op = f'"cat": "cpu_op", "name": {title}'
    if node.is_copy:
        to = "DtoH (Device -> Pinned)" if node.to == "host" else "HtoD (Pinned -> Device)"
        launch, category, name = "cudaMemcpyAsync", "gpu_memcpy", f"Memcpy {to}"
    elif node.is_computation:
        launch, category, name = "cudaLaunchKernel", "kernel", _kernel_name(node)
    else:
        called = NCCL.get(node.kind, (node.kind, node.kind))[1]
        launch, category, name = "cudaLaunchKernelExC", "kernel", f"ncclDevKernel_{called}"
    return (
        op,
        f'"cat": "cuda_runtime", "name": "{launch}"',
        f'"cat": "{category}", "name": {json.dumps(name)}, ',
    )


def _kernel_name(node: Node) -> str:
    """The name of a computation's kernel: a product with its extents, others by their op. A node of
    a recorded trace has the kernel's name."""
    if node.kernel is not None and node.kernel.extents:
        return str(node.kernel)
    return title_of(node.name) if node.kind == "comp" else node.kind


def _arguments(node: Node, mesh: Mapping[str, int]) -> str:
    """The arguments of a kernel; for communication they end in a comma."""
    if node.is_computation or node.is_copy:
        return json.dumps(arguments(node))[1:-1]
    return json.dumps(_communication(node, mesh))[1:-1] + ", "


def _communication(node: Node, mesh: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of a collective or message that all ranks of a class share."""
    dtype, into, out = elements_of(node, mesh)
    return {
        "Collective name": NCCL.get(node.kind, (node.kind, ""))[0],
        "In msg nelems": into,
        "Out msg nelems": out,
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Description": "+".join(node.group.words) or node.over,
    }


KINETO = KinetoFormat()
