"""The operations of a rank in GOAL: computations, sends and receives, with their dependencies.

A node becomes a block of operations. A computation, send or receive is one operation; a collective
is the messages of its expansion between two `calc 0`:

    %y = all_reduce over tp      calc 0 | send, recv, ... | calc 0
    what waits for %y            waits for the last one

Blocks are made once for each prototype and repeated as columns. Ranks of a class differ in peers,
and in the sizes of parts of buffers that do not divide evenly; operations refer to these by keys.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagec.formats.base import Layout, Neighbour
from stagec.formats.messages import Shape, expansion, other_end, part_bytes, shape_of
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node, Program
from stagec.support.memo import memo_method

SEND, RECV, CALC = 1, 2, 3
#: The cpus of streams: computations, collectives, sends, receives, copies to and from the host.
COMPUTE, COLLECTIVE, SENDS, RECEIVES, STORES, LOADS = range(6)
#: The first tag of collectives, which have a tag for each group; tags of messages are smaller.
COLLECTIVE_TAG = 1 << 30


class GroupMember(NamedTuple):
    """The member of a rank's group over `axes` whose position differs from the rank's own by
    `other`."""

    axes: GroupAxes
    other: int


class BufferShare(NamedTuple):
    """The bytes of the part of a buffer of `size` bytes whose index differs from the rank's own
    position in its group by `part`."""

    axes: GroupAxes
    size: int
    part: int


#: A value that differs between the ranks of a class.
Key = GroupMember | Neighbour | BufferShare


@dataclass
class Place:
    """A rank, by which keys have values."""

    layout: Layout
    rank: int

    @memo_method
    def row(self, axes: GroupAxes) -> tuple[Ints, int]:
        """The ranks of its group over `axes`, and its position among them."""
        row = self.layout.groups.row(axes, self.rank)
        return row, int(np.flatnonzero(row == self.rank)[0])

    def value(self, key: Key) -> int:
        """The rank of a peer, or the bytes of a share."""
        if isinstance(key, GroupMember):
            row, position = self.row(key.axes)
            return int(row[other_end(key.other, position, len(row))])
        if isinstance(key, BufferShare):
            row, position = self.row(key.axes)
            return part_bytes(key.size, len(row), (position + key.part) % len(row))
        return self.layout.peer(self.rank, *key)

    def shapes(self, groups: Iterable[GroupAxes], algorithm: str) -> Mapping[GroupAxes, Shape]:
        """Its shapes in these groups, for all_reduce."""
        rows = ((axes, *self.row(axes)) for axes in groups)
        return {
            axes: shape_of("all_reduce", len(row), algorithm, position)
            for axes, row, position in rows
        }


Row = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class NodeOps:
    """The operations of a node, each with its type, size, cpu, tag (-1 for the tag of the node),
    and the numbers of its keys for the peer and for the share of a buffer, or -1. An edge (i, j)
    means that operation i waits for j."""

    rows: list[Row]
    edges: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of a rank as columns, numbered from 0; `source[i]` waits for `target[i]`, in
    order of sources. `peer` and `share` are numbers of `keys`, or -1."""

    type: Ints
    size: Ints
    cpu: Ints
    tag: Ints
    peer: Ints
    share: Ints
    source: Ints
    target: Ints
    keys: list[Key]

    def __len__(self) -> int:
        return len(self.type)


class OpCounts(NamedTuple):
    """The sizes of `Ops`; `roots` counts operations without dependencies."""

    ops: int
    edges: int
    roots: int


@dataclass
class Expander:
    """Makes the operations of the ranks of a class that have the same `shapes`. `nanoseconds`
    returns the time of a computation or copy."""

    program: Program
    layout: Layout
    nanoseconds: Callable[[Node], int]
    algorithm: str
    shapes: Mapping[GroupAxes, Shape]
    _keys: dict[Key, int] = field(default_factory=dict[Key, int])
    _blocks: list[NodeOps] = field(default_factory=list[NodeOps])

    def blocks(self) -> list[NodeOps]:
        """The block of each prototype, empty for one without nodes."""
        if not self._blocks:
            pairs = zip(self.program.prototypes, self.program.counts.tolist(), strict=True)
            self._blocks = [self._block(n) if used else NodeOps([], []) for n, used in pairs]
        return self._blocks

    def counts(self) -> OpCounts:
        """The sizes of `ops`, without making them."""
        program, blocks = self.program, self.blocks()
        ops = np.array([len(b.rows) for b in blocks], dtype=np.int64)
        edges = np.array([len(b.edges) for b in blocks], dtype=np.int64)
        roots = int(np.count_nonzero(np.diff(program.starts) == 0))
        inner, outer = int(edges @ program.counts), len(program.edges)
        return OpCounts(int(ops @ program.counts), inner + outer, roots)

    def ops(self) -> Ops:
        """The operations of a rank."""
        program, blocks = self.program, self.blocks()
        rows = np.array([r for b in blocks for r in b.rows], dtype=np.int64).reshape(-1, 6)
        pairs = np.array([e for b in blocks for e in b.edges], dtype=np.int64).reshape(-1, 2)
        lengths = np.array([len(b.rows) for b in blocks], dtype=np.int64)[program.prototype]
        starts = np.cumsum(lengths) - lengths
        which = _repeated([len(b.rows) for b in blocks], program.prototype)
        type_, size, cpu, tag, peer, share = rows[which].T
        tag = np.where(tag < 0, np.repeat(program.tag, lengths), tag)
        inner = pairs[_repeated([len(b.edges) for b in blocks], program.prototype)]
        inner_counts = np.array([len(b.edges) for b in blocks], dtype=np.int64)[program.prototype]
        inner += np.repeat(starts, inner_counts)[:, None]
        waits = np.repeat(starts, np.diff(program.starts))
        for_ = (starts + lengths - 1)[program.edges - 1]
        source, target = np.concatenate([inner.T, np.stack([waits, for_])], axis=1)
        order = np.lexsort((target, source))
        keys = [*self._keys]
        return Ops(type_, size, cpu, tag, peer, share, source[order], target[order], keys)

    def _block(self, node: Node) -> NodeOps:
        if node.is_collective:
            return self._collective(node)
        if node.is_message:
            type_, cpu = (SEND, SENDS) if node.kind == "send" else (RECV, RECEIVES)
            return NodeOps([(type_, max(1, node.size), cpu, -1, self._key(node.way), -1)], [])
        copies = {"host": STORES, "device": LOADS}
        cpu = copies.get(node.to, COMPUTE)
        return NodeOps([(CALC, self.nanoseconds(node), cpu, 0, -1, -1)], [])

    def _collective(self, node: Node) -> NodeOps:
        axes = node.group
        n = axes.size(self.layout.mesh)
        shape = self.shapes.get(axes, ()) if node.kind == "all_reduce" else ()
        ends = expansion(node.kind, n, self.algorithm, shape)
        tag = COLLECTIVE_TAG + [*self.layout.groups.first].index(axes)
        nothing: Row = (CALC, 0, COLLECTIVE, 0, -1, -1)
        rows: list[Row] = [nothing]
        edges: list[tuple[int, int]] = []
        waited = {place for end in ends for place in end.after}
        for place, end in enumerate(ends, start=1):
            edges += [(place, 1 + before) for before in end.after] or [(place, 0)]
            if end.way == "join":
                rows.append(nothing)
                continue
            peer, size, share = self._key(GroupMember(axes, end.other)), max(1, node.size), -1
            if end.part is not None:
                size = part_bytes(node.size, n, n - 1)
                if node.size > n and node.size % n:
                    share = self._key(BufferShare(axes, node.size, end.part % n))
            rows.append((SEND if end.way == "send" else RECV, size, COLLECTIVE, tag, peer, share))
        last = len(rows)
        rows.append(nothing)
        edges += [(last, 1 + place) for place in range(len(ends)) if place not in waited]
        return NodeOps(rows, edges or [(last, 0)])

    def _key(self, key: Key) -> int:
        return self._keys.setdefault(key, len(self._keys))


def _repeated(lengths: list[int], prototype: Ints) -> Ints:
    """Indices into concatenated blocks of these lengths that repeat the block of each node's
    prototype."""
    count = np.array(lengths, dtype=np.int64)
    offsets = (np.cumsum(count) - count)[prototype]
    taken = count[prototype]
    starts = np.cumsum(taken) - taken
    return np.repeat(offsets - starts, taken) + np.arange(int(taken.sum()))
