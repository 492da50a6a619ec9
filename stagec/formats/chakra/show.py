"""The rows of `stagec show`: a trace file as plain data, and its totals by kind of node.

Keeps only one node in memory at a time.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from stagec.formats.chakra.nodes import AttrValue, CollKind, NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace


@dataclass(frozen=True, slots=True)
class Row:
    """One node. Fields that do not apply to its kind, or are not in the file, are None. `peer` is
    the rank at the other end of a send or receive.
    """

    id: int
    kind: str
    name: str
    flops: int | None
    tensor_bytes: int | None
    comm_bytes: int | None
    collective: str | None
    group: str | None
    peer: int | None
    tag: int | None
    data_deps: tuple[int, ...]
    ctrl_deps: tuple[int, ...]
    alloc_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(slots=True)
class KindTotals:
    """Sums over the nodes of one kind; collectives have one entry per collective."""

    kind: str
    nodes: int = 0
    flops: int = 0
    tensor_bytes: int = 0
    comm_bytes: int = 0

    def add(self, row: Row) -> None:
        """Add a node."""
        self.nodes += 1
        self.flops += row.flops or 0
        self.tensor_bytes += row.tensor_bytes or 0
        self.comm_bytes += row.comm_bytes or 0


@dataclass(slots=True)
class Totals:
    """The sums over a file, by kind: `comp`, `all_reduce`, `send`, ... ..."""

    nodes: int = 0
    by_kind: dict[str, KindTotals] = field(default_factory=dict[str, KindTotals])


def describe(path: Path, limit: int | None = None) -> Iterator[Row]:
    """The first `limit` nodes of a file in file order, or all for None.

    Raises TraceError for a file that is not a trace.
    """
    most = None if limit is None else min(limit, sys.maxsize)
    return (row_of(node) for node in islice(read_trace(path), most))


def totals(path: Path) -> Totals:
    """The totals of a whole file.

    Raises TraceError for a file that is not a trace.
    """
    result = Totals()
    for row in describe(path):
        label = row.collective or row.kind
        result.nodes += 1
        result.by_kind.setdefault(label, KindTotals(label)).add(row)
    return result


def row_of(node: TraceNode) -> Row:
    """A node as a row."""
    attrs = node.attrs
    group = attrs.get("pg_name")
    return Row(
        id=node.id,
        kind=_kind_label(node.kind),
        name=node.name,
        flops=_integer(attrs.get("num_ops")),
        tensor_bytes=_integer(attrs.get("tensor_size")),
        comm_bytes=_integer(attrs.get("comm_size")),
        collective=_collective_label(node),
        group=group if isinstance(group, str) else None,
        peer=_peer(node),
        tag=_integer(attrs.get("comm_tag")),
        data_deps=node.data_deps,
        ctrl_deps=node.ctrl_deps,
        alloc_bytes=_integer(attrs.get("alloc_bytes")),
        free_bytes=_integer(attrs.get("free_bytes")),
    )


def collective_label(kind: int) -> str:
    """The name of a collective: `all_reduce` for 0; `collective 42` for a number that is not in the
    schema."""
    try:
        return CollKind(kind).label
    except ValueError:
        return f"collective {kind}"


def _kind_label(kind: int) -> str:
    try:
        return NodeKind(kind).label
    except ValueError:
        return f"kind {kind}"


def _collective_label(node: TraceNode) -> str | None:
    kind = _integer(node.attrs.get("comm_type"))
    if node.kind != NodeKind.COLL or kind is None:
        return None
    return collective_label(kind)


def _peer(node: TraceNode) -> int | None:
    names = {NodeKind.SEND: "comm_dst", NodeKind.RECV: "comm_src"}
    for kind, name in names.items():
        if node.kind == kind:
            return _integer(node.attrs.get(name))
    return None


def _integer(value: AttrValue | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
