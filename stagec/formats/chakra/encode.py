"""Encodes class programs: serialised once per class, patched for each rank.

Ranks of a class differ only in the identifiers of their communicators and in their peers. A node's
`pg_name`, or its peer, is the last field of its record, so it is a few bytes at a known position.
Programs are serialised once for each combination of identifier widths (all peers of a job have the
same width), and these bytes are overwritten for each rank.

Nodes that differ only in their names and numbers, with the same widths, have the same layout: one
of them is serialised, and the others are copies with other letters and digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from stagec.formats.base import Bytes, Durations, Format, Layout, Neighbour, PatchedEncoder, Variant
from stagec.formats.chakra.nodes import (
    AttrValue,
    CollKind,
    NodeKind,
    TraceNode,
    encode_metadata,
    encode_node,
    varint,
)
from stagec.formats.chakra.tensors import TensorLists
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node, Program, marker_of, numbered
from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN

if TYPE_CHECKING:
    from stagec.formats.chakra.operands import Operands

SCHEMA_VERSION = "0.0.4"
_KINDS = {kind.label: kind for kind in CollKind}
_K = TypeVar("_K")
#: Nodes with more edges than this are serialised one by one. The widths of this many edges, two
#: bits each, fit in one integer.
_MOST_EDGES = 26


@dataclass(frozen=True, slots=True)
class TraceWriter:
    """Makes trace nodes in the form that consumers expect."""

    mesh: Mapping[str, int]
    ranks: int
    durations: Durations | None = None
    tensors: TensorLists | None = None
    operands: Operands | None = None

    def trace_node(self, node: Node, group: str, prototype: Node) -> TraceNode:
        """The trace node of a node, with the operands of its prototype if `operands` is set."""
        record = self._trace_node(node, group)
        if self.operands is None:
            return record
        inputs, outputs = self.operands.sides(prototype)
        attrs = {**self.operands.attributes(prototype), **record.attrs}  # the group or peer is last
        return replace(record, attrs=attrs, inputs=inputs, outputs=outputs)

    def _trace_node(self, node: Node, group: str) -> TraceNode:
        """The trace node without operands. Zero FLOPs or bytes are written as 1, since consumers
        stall on 0."""
        attrs: dict[str, AttrValue] = {"is_cpu_op": False}
        memory = {"alloc_bytes": node.alloc, "free_bytes": node.free}
        attrs |= {name: size for name, size in memory.items() if size}
        if self.tensors is not None:
            attrs |= self.tensors.attributes(node.id)
        kind, size, duration = NodeKind.COMP, max(1, node.size), 0
        if node.is_message:
            sends = node.kind == "send"
            kind = NodeKind.SEND if sends else NodeKind.RECV
            peer = "comm_dst" if sends else "comm_src"
            attrs |= {"comm_size": size, "comm_tag": node.tag, peer: self._largest_peer}
        elif node.is_copy:
            kind = NodeKind.MEM_STORE if node.to == "host" else NodeKind.MEM_LOAD
            attrs["tensor_size"] = size
        elif node.is_collective:
            kind = NodeKind.COLL
            attrs["comm_type"] = int(_collective(node))
            attrs |= {"comm_size": max(1, self.comm_size(node)), "pg_name": group}
        else:
            duration = micros(self.durations(node)) if self.durations else 0
            attrs |= {"num_ops": max(1, node.flops), "tensor_size": size}
        data, control = (tuple(d.id for d in edges) for edges in (node.deps, node.after))
        return TraceNode(node.id, node.name, kind, data, control, attrs, duration)

    @property
    def _largest_peer(self) -> int:
        return (1 << (7 * len(varint(self.ranks - 1)))) - 1

    def comm_size(self, node: Node) -> int:
        """The bytes of a collective as consumers read them: the shard for an all_gather, the full
        buffer for others."""
        if node.kind != "all_gather":
            return node.size
        return node.size // node.group.size(self.mesh)


class Encoder(PatchedEncoder):
    """Makes the file of any rank of a class."""

    def __init__(
        self,
        format_: Format,
        program: Program,
        layout: Layout,
        durations: Durations | None = None,
        tensors: TensorLists | None = None,
        operands: Operands | None = None,
    ) -> None:
        super().__init__(format_, layout, program.groups)
        self._program = program
        self._writer = TraceWriter(layout.mesh, layout.groups.ranks, durations, tensors, operands)

    def serialised(self, widths: Mapping[GroupAxes, int]) -> Variant:
        return _serialise(self._program, self._writer, widths)


def micros(seconds: float) -> int:
    """A duration in whole microseconds, which the format requires; at least one."""
    return max(1, round(1e6 * seconds))


def _serialise(program: Program, writer: TraceWriter, widths: Mapping[GroupAxes, int]) -> Variant:
    metadata = np.frombuffer(encode_metadata(SCHEMA_VERSION), dtype=np.uint8)
    alike = _same_layout(program, writer) if writer.tensors is None else _alone(program)
    kinds = list(alike)
    records = [
        _serialise_like(
            program, members, writer, "9" * widths.get(_first(program, members).group, 0)
        )
        for members in kinds
    ]
    lengths = np.zeros(len(program), dtype=np.int64)
    for members, block in zip(kinds, records, strict=True):
        lengths[members] = block.shape[1]
    after = len(metadata) + np.cumsum(lengths)
    data = np.empty(after[-1], dtype=np.uint8)
    data[: len(metadata)] = metadata
    for members, block in zip(kinds, records, strict=True):
        size = block.shape[1]
        shape, strides = (len(data) - size + 1, size), (1, 1)
        windows: Bytes = np.ndarray(shape, np.uint8, data.data, strides=strides)
        windows[after[members] - size] = block
    ends: dict[GroupAxes, list[Ints]] = {axes: [] for axes in widths}
    peers: dict[Neighbour, list[Ints]] = {}
    for members in kinds:
        node = _first(program, members)
        if node.is_collective:
            ends[node.group].append(after[members] - 1)
        elif node.is_message:
            peers.setdefault(node.way, []).append(after[members] - 1)
    return Variant(data, _positions(ends), _positions(peers))


def _first(program: Program, members: Ints) -> Node:
    return program.prototypes[int(program.prototype[members[0]])]


def _alone(program: Program) -> Iterator[Ints]:
    """Each node separately: names of tensors are unique."""
    return iter(np.arange(len(program), dtype=np.int64).reshape(-1, 1))


def _same_layout(program: Program, writer: TraceWriter) -> Iterator[Ints]:
    """The indices of the nodes of each layout. Kernels distinguish layouts if durations are
    written, operands if they are written."""
    count = len(program)
    numbers = np.diff(program.starts)
    inner = np.arange(len(program.edges)) - np.repeat(program.starts[:-1], numbers)
    shift = np.minimum(2 * inner, 62)
    weights = (_varint_width(program.edges) - 1) << shift
    total = np.concatenate([[0], np.cumsum(weights)])
    edges = total[program.starts[1:]] - total[program.starts[:-1]]
    alike = _alike(program.prototypes, writer)[program.prototype]
    marked = alike[:, 2] >= 0
    digits = np.where(marked, decimal_width(program.microbatch), 0)
    single = np.where(numbers > _MOST_EDGES, np.arange(1, count + 1), 0)
    data = program.control - program.starts[:-1]
    tag = _varint_width(program.tag)
    memory = (program.events.alloc, program.events.free) if program.events is not None else ()
    facts = (*alike.T, digits, _varint_width(np.arange(1, count + 1)), tag, *memory)
    keys = (*facts, data, numbers, edges, single)
    order = np.lexsort(keys)
    differs = np.zeros(count, dtype=bool)
    differs[0] = True
    for key in keys:
        ordered = key[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    yield from np.split(order, np.flatnonzero(differs)[1:])


def _alike(prototypes: Sequence[Node], writer: TraceWriter) -> Ints:
    """For each prototype: a number for everything but its name, the length of its name without the
    number of the microbatch, and the position of that number in it, or -1."""
    known: dict[tuple[object, ...], int] = {}
    timed, operands = writer.durations is not None, writer.operands
    rows: list[tuple[int, int, int]] = []
    for n in prototypes:
        facts: tuple[object, ...] = (
            *(n.kind, n.phase, n.size, n.flops, n.group, n.over, n.by, n.to),
            timed and n.kernels,
        )
        if operands is not None:
            facts += (operands.sides(n), *operands.attributes(n).values())
        mark = marker_of(n.name)
        at = len(n.name.partition(mark)[0].encode()) if mark else -1
        rows.append((known.setdefault(facts, len(known)), len(n.name.encode()) - len(mark), at))
    return np.array(rows, dtype=np.int64)


def _collective(node: Node) -> CollKind:
    """The kind of a collective. Raises `DiagnosticError` for one that the schema does not have."""
    collective = _KINDS.get(node.kind)
    if collective is None:
        raise error(
            f"traces have no collective '{node.kind}'",
            node.op.loc if node.op is not None else UNKNOWN,
            remedy=f"the kinds are: {', '.join(_KINDS)}",
        )
    return collective


def _encoded(node: TraceNode) -> bytes:
    """The record of a node. Raises `DiagnosticError` for a number that is too large for the
    format."""
    try:
        return encode_node(node)
    except ValueError as problem:
        raise error(
            f"a trace cannot hold this: {problem}",
            remedy="choose smaller sizes: traces have integers of 64 bits",
        ) from None


def _serialise_like(program: Program, members: Ints, writer: TraceWriter, group: str) -> Bytes:
    """The records of nodes of one layout: one is serialised by protobuf, then repeated and
    overwritten. Fields are in the order of their numbers: identifier, name, kind, control and data
    dependencies, ..., attributes."""
    prototype = _first(program, members)
    one = int(members[0])
    begin, middle, end = program.starts[one], program.control[one], program.starts[one + 1]
    edges = [Node("", "", "", 0, id=e) for e in program.edges[begin:end].tolist()]
    mark, microbatch = marker_of(prototype.name), int(program.microbatch[one])
    name = numbered(prototype.name, microbatch)
    data = int(middle - begin)
    node = replace(prototype, id=one + 1, name=name, tag=int(program.tag[one]))
    node.deps, node.after = edges[:data], edges[data:]
    if program.events is not None:
        node.alloc, node.free = int(program.events.alloc[one]), int(program.events.free[one])
    record = _encoded(writer.trace_node(node, group, prototype))
    block = np.tile(np.frombuffer(record, dtype=np.uint8), (len(members), 1))
    if len(members) == 1:
        return block
    at = 1 + next(i for i, byte in enumerate(record) if byte < _MORE)  # the length
    at = _put(block, at + 1, members + 1)
    if name:
        length = len(name.encode())
        at += 1 + len(varint(length))
        used, which = np.unique(program.prototype[members], return_inverse=True)
        like: list[int] = used.tolist()
        if len(like) > 1:
            text = "".join(numbered(program.prototypes[i].name, microbatch) for i in like)
            table = np.frombuffer(text.encode(), dtype=np.uint8).reshape(-1, length)
            block[:, at : at + length] = table[which]
        if mark:
            digits = at + len(prototype.name.partition(mark)[0].encode())
            _put_decimal(block, digits, len(str(microbatch)), program.microbatch[members])
        at += length
    at += 2  # the kind
    for starts, targets in ((program.control, node.after), (program.starts, node.deps)):
        if targets:
            at += 1 + len(varint(sum(len(varint(e.id)) for e in targets)))
            for i in range(len(targets)):
                at = _put(block, at, program.edges[starts[members] + i])
    if prototype.is_message:
        _put(block, record.rindex(_TAG) + len(_TAG), program.tag[members])
    return block


_MORE = 0x80
#: The name of the attribute, and the key of its 32-bit value.
_TAG = b"comm_tag\x38"


def _put(block: Bytes, at: int, numbers: Ints) -> int:
    """Overwrite varints of equal width, and return the position after them."""
    width = len(varint(int(numbers[0])))
    for i in range(width):
        digit = numbers >> (7 * i) & 0x7F
        block[:, at + i] = digit | _MORE if i < width - 1 else digit
    return at + width


def _put_decimal(block: Bytes, at: int, width: int, numbers: Ints) -> None:
    for i in range(width):
        block[:, at + width - 1 - i] = ord("0") + numbers // 10**i % 10


def _varint_width(numbers: Ints) -> Ints:
    """The number of bytes of each number as a varint."""
    limits = np.array([1 << (7 * i) for i in range(1, 9)], dtype=np.int64)
    return np.searchsorted(limits, numbers, side="right") + 1


def decimal_width(numbers: Ints) -> Ints:
    """The number of decimal digits of each number."""
    limits = np.array([10**i for i in range(1, 18)], dtype=np.int64)
    return np.searchsorted(limits, numbers, side="right") + 1


def _positions(positions: Mapping[_K, list[Ints]]) -> dict[_K, Ints]:
    return {key: np.sort(np.concatenate(ends)) for key, ends in positions.items() if ends}


def fixed_varint(number: int, width: int) -> bytes:
    """A varint of exactly `width` bytes, padded with empty groups, which readers accept."""
    digits = [number >> (7 * i) & 0x7F for i in range(width)]
    return bytes([*(d | 0x80 for d in digits[:-1]), digits[-1]])
