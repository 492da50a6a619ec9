"""Class programs as bytes: serialised once, patched per rank.

Ranks of a class differ in the identifiers of their communicators only. A node's `pg_name` is the
last field of its record, so an identifier is a few bytes at a known place; programs are serialised
once for each combination of identifier widths, and a rank is a copy with the digits overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stagec.trace.chakra import (
    AttrValue,
    CollKind,
    NodeKind,
    TraceNode,
    encode_metadata,
    encode_node,
)
from stagec.trace.groups import Axes, Groups
from stagec.trace.program import Node, Program

SCHEMA_VERSION = "0.0.4"
_KINDS = {kind.label: kind for kind in CollKind}


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
    """A serialised program and, for each axes, the positions of the last digit of its
    identifiers."""

    data: npt.NDArray[np.uint8]
    ends: Mapping[Axes, npt.NDArray[np.int64]]


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
        return data.tobytes()

    def _variant(self, widths: tuple[int, ...]) -> _Variant:
        if widths not in self._variants:
            self._variants[widths] = self._serialise(dict(zip(self._axes, widths, strict=True)))
        return self._variants[widths]

    def _serialise(self, widths: Mapping[Axes, int]) -> _Variant:
        parts = [encode_metadata(SCHEMA_VERSION)]
        ends: dict[Axes, list[int]] = {axes: [] for axes in widths}
        length = len(parts[0])
        for node in self._program.nodes:
            record = encode_node(self.trace_node(node, "9" * widths.get(node.group, 0)))
            parts.append(record)
            length += len(record)
            if node.is_collective:
                ends[node.group].append(length - 1)
        data = np.frombuffer(b"".join(parts), dtype=np.uint8)
        return _Variant(data, {a: np.array(e, dtype=np.int64) for a, e in ends.items()})

    def trace_node(self, node: Node, group: str) -> TraceNode:
        """A node as consumers want it. No FLOPs or bytes are written as 1: consumers stall on 0."""
        data = tuple(d.id for d in node.deps)
        control = tuple(d.id for d in node.after)
        if not node.is_collective:
            micros = self._roofline.micros(node) if self._roofline else 0
            attrs: dict[str, AttrValue] = {
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
