"""From an archive to the programs of its classes: what other formats are made of.

An archive holds Chakra records. They say what each node does, with whom, and after which others;
they hold no kernels, so a format that needs these is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stagec.formats.base import Variant
from stagec.formats.chakra.nodes import (
    CollKind,
    NodeKind,
    TraceError,
    TraceNode,
    decode_node,
    prefixed,
)
from stagec.formats.chakra.record_files import split_records
from stagec.program.groups import NO_GROUP, GroupAxes
from stagec.program.nodes import Events, Ints, Node, Program
from stagec.support.diagnostics import error
from stagec.support.json_values import is_object

_COPIES = {NodeKind.MEM_LOAD: ("load", "device"), NodeKind.MEM_STORE: ("store", "host")}
_ENDS = {NodeKind.SEND: "send", NodeKind.RECV: "recv"}
#: An axis, and the coordinate of the other end of a message less one's own.
Way = tuple[str, int]


@dataclass(slots=True, eq=False)
class StoredNode(Node):
    """A node of an archive, with the seconds that its record has."""

    seconds: float = 0.0


def stored_seconds(node: Node) -> float:
    """Seconds of a computation as its record has them: whole microseconds."""
    return node.seconds if isinstance(node, StoredNode) else 0.0


@dataclass
class ProgramReader:
    """The columns of a program, as far as they are read from the records of a rank."""

    mesh: Mapping[str, int]
    known: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    prototypes: list[Node] = field(default_factory=list[Node])
    prototype: list[int] = field(default_factory=list[int])
    tag: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=lambda: [0])
    control: list[int] = field(default_factory=list[int])
    edges: list[int] = field(default_factory=list[int])
    alloc: list[int] = field(default_factory=list[int])
    free: list[int] = field(default_factory=list[int])

    def take(self, node: TraceNode, axes: GroupAxes = NO_GROUP, way: Way = ("", 0)) -> None:
        """Take in the next node: a collective over `axes`, or an end of a message along a way.
        Raises ValueError for one that is numbered otherwise, or that waits for a later one."""
        if node.id != len(self.starts):
            raise ValueError(f"{node.label}: expected node {len(self.starts)}")
        if not all(0 < other < node.id for other in (*node.data_deps, *node.ctrl_deps)):
            raise ValueError(f"{node.label} depends on a node that does not come before it")
        new = self._node(node, axes, way)
        what = new.kind, new.name, new.size, new.flops, new.seconds
        facts = *what, new.group, new.over, new.by
        if facts not in self.known:
            self.known[facts] = len(self.prototypes)
            self.prototypes.append(new)
        self.prototype.append(self.known[facts])
        self.tag.append(_integer(node, "comm_tag"))
        self.control.append(len(self.edges) + len(node.data_deps))
        self.edges += (*node.data_deps, *node.ctrl_deps)
        self.starts.append(len(self.edges))
        self.alloc.append(_integer(node, "alloc_bytes"))
        self.free.append(_integer(node, "free_bytes"))

    def _node(self, node: TraceNode, axes: GroupAxes, way: Way) -> StoredNode:
        phase = node.name.partition("/")[0]
        if node.kind == NodeKind.COLL:
            kind = CollKind(_integer(node, "comm_type")).label
            size = _integer(node, "comm_size")
            full = size * axes.size(self.mesh) if kind == "all_gather" else size
            return StoredNode(kind, node.name, phase, full, group=axes)
        if node.kind in _ENDS:
            kind, (over, towards) = _ENDS[NodeKind(node.kind)], way
            by = towards if kind == "send" else -towards
            return StoredNode(kind, node.name, phase, _integer(node, "comm_size"), over=over, by=by)
        size = _integer(node, "tensor_size")
        if node.kind in _COPIES:
            kind, to = _COPIES[NodeKind(node.kind)]
            return StoredNode(kind, node.name, phase, size, to=to)
        flops, seconds = _integer(node, "num_ops"), node.duration_micros / 1e6
        none = flops == 1  # what stands there for no FLOPs
        return StoredNode(
            "comp", node.name, phase, size, flops=0 if none else flops, seconds=seconds
        )

    def program(self, name: str, static: int | None) -> Program:
        """The program. `static` are the bytes beside its events, if there are some."""
        given = self.prototype, [0] * len(self.prototype), self.tag, self.starts, self.control
        prototype, microbatch, tag, starts, control = map(_column, given)
        edges, alloc, free = map(_column, (self.edges, self.alloc, self.free))
        events = None if static is None else Events(static, alloc, free)
        order = starts, control, edges, events
        return Program(name, self.prototypes, prototype, microbatch, tag, *order)


def _column(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def stored_program(
    name: str, variant: Variant, mesh: Mapping[str, int], path: Path, memory: object
) -> Program:
    """The program of a class of an archive from its records. `memory` is what its manifest says of
    memory events. Raises `DiagnosticError` for records that stagec did not write."""
    groups = {int(end): axes for axes, ends in variant.ends.items() for end in ends}
    ways = {int(end): way for way, ends in variant.peers.items() for end in ends}
    read = ProgramReader(mesh)
    try:
        for offset, raw in split_records(path, variant.data.tobytes()):
            node, end = decode_node(path, offset, raw), offset + len(prefixed(raw)) - 1
            axes = groups[end] if node.kind == NodeKind.COLL else NO_GROUP
            read.take(node, axes, ways[end] if node.kind in _ENDS else ("", 0))
        return read.program(name, static_bytes(memory))
    except (TraceError, KeyError, OverflowError, ValueError) as problem:
        raise error(
            f"'{path}' holds a record that stagec did not write: {problem}",
            remedy="write the archive again with stagec compile --archive",
        ) from None


def _integer(node: TraceNode, name: str) -> int:
    value = node.attrs.get(name, 0)
    if not isinstance(value, int):
        raise ValueError(f"{node.label}: {name} is not an integer")
    return value


def static_bytes(memory: object) -> int | None:
    """What a manifest says that is held beside memory events, if it says so."""
    size = memory.get("static_bytes") if is_object(memory) else None
    return size if isinstance(size, int) else None
