"""Class programs as bytes: serialised once, patched per rank.

Ranks of a class differ in the identifiers of their communicators and in their peers only. A node's
`pg_name`, or its peer, is the last field of its record, so it is a few bytes at a known place.
Programs are serialised once for each combination of identifier widths (peers have one width in a
job), and a rank is a copy with these bytes overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stagec.trace.chakra import (
    AttrValue,
    CollKind,
    NodeKind,
    TraceNode,
    encode_metadata,
    encode_node,
    varint,
)
from stagec.trace.groups import Axes, Groups, neighbours
from stagec.trace.nodes import Node, Program

SCHEMA_VERSION = "0.0.4"
_KINDS = {kind.label: kind for kind in CollKind}
_K = TypeVar("_K")
#: mesh axis and difference of coordinates
_Neighbour = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device for `duration_micros`: peak FLOP/s and bytes/s."""

    flops: float
    bandwidth: float

    def micros(self, node: Node) -> int:
        """Microseconds of a computation, at least one."""
        return max(1, round(1e6 * max(node.flops / self.flops, node.size / self.bandwidth)))


@dataclass(frozen=True, slots=True)
class _Variant:
    """A serialised program; for each axes and each neighbour, the positions of the last byte of
    its identifiers."""

    data: npt.NDArray[np.uint8]
    ends: Mapping[Axes, npt.NDArray[np.int64]]
    peers: Mapping[_Neighbour, npt.NDArray[np.int64]]


class Encoder:
    """Makes the file of any rank of a class."""

    def __init__(
        self,
        program: Program,
        mesh: Mapping[str, int],
        groups: Groups,
        roofline: Roofline | None = None,
    ) -> None:
        self._program, self._mesh, self._groups, self._roofline = program, mesh, groups, roofline
        self._axes = program.groups
        self._peer_width = len(varint(groups.ranks - 1))
        self._largest_peer = (1 << (7 * self._peer_width)) - 1
        self._variants: dict[tuple[int, ...], _Variant] = {}

    def rank(self, rank: int) -> bytes:
        """The bytes of `<name>.<rank>.et`."""
        ids = [str(self._groups.of_rank(axes, rank)) for axes in self._axes]
        variant = self._variant(tuple(map(len, ids)))
        data = variant.data.copy()
        for axes, text in zip(self._axes, ids, strict=True):
            ends = variant.ends[axes]
            for place, digit in enumerate(reversed(text.encode())):
                data[ends - place] = digit
        for (axis, by), ends in variant.peers.items():
            peer = int(neighbours(self._mesh, axis, by, np.array([rank]))[0])
            for place, byte in enumerate(reversed(_fixed_varint(peer, self._peer_width))):
                data[ends - place] = byte
        return data.tobytes()

    def _variant(self, widths: tuple[int, ...]) -> _Variant:
        if widths not in self._variants:
            self._variants[widths] = self._serialise(dict(zip(self._axes, widths, strict=True)))
        return self._variants[widths]

    def _serialise(self, widths: Mapping[Axes, int]) -> _Variant:
        parts = [encode_metadata(SCHEMA_VERSION)]
        ends: dict[Axes, list[int]] = {axes: [] for axes in widths}
        peers: dict[_Neighbour, list[int]] = {}
        length = len(parts[0])
        for node in self._program.nodes:
            record = encode_node(self.trace_node(node, "9" * widths.get(node.group, 0)))
            parts.append(record)
            length += len(record)
            if node.is_collective:
                ends[node.group].append(length - 1)
            elif node.is_message:
                towards = node.by if node.kind == "send" else -node.by
                peers.setdefault((node.over, towards), []).append(length - 1)
        data = np.frombuffer(b"".join(parts), dtype=np.uint8)
        return _Variant(data, _positions(ends), _positions(peers))

    def trace_node(self, node: Node, group: str) -> TraceNode:
        """A node as consumers want it. No FLOPs or bytes are written as 1: consumers stall on 0."""
        attrs: dict[str, AttrValue]
        data = tuple(d.id for d in node.deps)
        control = tuple(d.id for d in node.after)
        if node.is_message:
            sends = node.kind == "send"
            attrs = {
                "is_cpu_op": False,
                "comm_size": max(1, node.size),
                "comm_tag": node.tag,
                "comm_dst" if sends else "comm_src": self._largest_peer,
            }
            end = NodeKind.SEND if sends else NodeKind.RECV
            return TraceNode(node.id, node.name, end, data, control, attrs)
        if not node.is_collective:
            micros = self._roofline.micros(node) if self._roofline else 0
            attrs = {
                "is_cpu_op": False,
                "num_ops": max(1, node.flops),
                "tensor_size": max(1, node.size),
            }
            return TraceNode(node.id, node.name, NodeKind.COMP, data, control, attrs, micros)
        kind = _KINDS[node.kind]
        attrs = {
            "is_cpu_op": False,
            "comm_type": int(kind),
            "comm_size": self.comm_size(node),
            "pg_name": group,
        }
        return TraceNode(node.id, node.name, NodeKind.COLL, data, control, attrs)

    def comm_size(self, node: Node) -> int:
        """Bytes as consumers read them: the shard for an all-gather, the full buffer otherwise."""
        if node.kind != "all_gather":
            return node.size
        members = 1
        for axis in node.group:
            members *= self._mesh[axis]
        return node.size // members


def _positions(found: Mapping[_K, list[int]]) -> dict[_K, npt.NDArray[np.int64]]:
    return {key: np.array(ends, dtype=np.int64) for key, ends in found.items()}


def _fixed_varint(number: int, width: int) -> bytes:
    """A varint of exactly `width` bytes: padded with empty groups, which readers accept."""
    digits = [number >> (7 * i) & 0x7F for i in range(width)]
    return bytes([*(d | 0x80 for d in digits[:-1]), digits[-1]])
