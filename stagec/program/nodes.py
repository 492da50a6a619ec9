"""Nodes of a program, and references to the nodes of a value while a graph is unrolled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from stagec.ir.core import Operation
from stagec.program.groups import NO_GROUP, GroupAxes
from stagec.program.kernels import Kernel

Names = Literal["full", "short", "none", "chakra"]
Ints = npt.NDArray[np.int64]
#: The categories that nodes are counted by: computations, collectives, sends and receives, copies
#: to and from the host.
NODE_KINDS = ("comp", "coll", "send", "recv", "store", "load")


#: The kind of a placeholder for a value of another step.
OUTSIDE = "outside"

#: The names of record types in Chakra's schema.
_RECORDS: Mapping[str, str] = {
    "comp": "COMP_NODE",
    "coll": "COMM_COLL_NODE",
    "send": "COMM_SEND_NODE",
    "recv": "COMM_RECV_NODE",
    "store": "MEM_STORE_NODE",
    "load": "MEM_LOAD_NODE",
}


@dataclass(slots=True, eq=False)
class Node:
    """One node: a computation (`flops`, and `size` bytes read and written), a collective over
    `group` (`size` bytes in the full buffer), a `send` or `recv` of `size` bytes, or a copy of
    `size` bytes `to` the host or the device (`kind` is then `store` or `load`).

    A computation is one launch of `kernel`, or, if it was merged from several, the launches of
    `parts`. `matmul` are the FLOPs of matrix products, `out` the bytes of its result. Later
    computations wait for a `blocking` collective. A `bucket` is one call of a reduction in several,
    issued when its gradients are complete. `index` is its number among the calls; for other nodes
    it is the layer, where sizes differ by layer. In an all_to_all that sends a token to each node
    once, `dealt` is the number of experts per token, and the most groups of experts that these are
    in (0: no limit); it is (0, 0) for other nodes. `layer` is the index of its layer in the
    outermost stack, -1 outside of layers. `scope` is the first part of the name: phase, microbatch
    and layer. A message goes along the axis `over` to the coordinate that is larger by `by`; both
    ends have the same `tag`. `deps` are data dependencies, `after` control dependencies. `alloc`
    and `free` are its bytes in `Events`, `op` is the operation that it executes.
    """

    kind: str
    name: str
    phase: str
    size: int
    flops: int = 0
    matmul: int = 0
    out: int = 0
    kernel: Kernel | None = None
    parts: tuple[Kernel, ...] = ()
    group: GroupAxes = NO_GROUP
    blocking: bool = False
    bucket: bool = False
    scope: str = ""
    over: str = ""
    by: int = 0
    tag: int = 0
    to: str = ""
    alloc: int = 0
    free: int = 0
    op: Operation | None = field(default=None, repr=False)
    deps: Sequence[Node] = field(default=(), repr=False)
    after: Sequence[Node] = field(default=(), repr=False)
    id: int = 0
    index: int = 0
    layer: int = -1
    dealt: tuple[int, int] = (0, 0)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernel launches of a computation."""
        return self.parts or (() if self.kernel is None else (self.kernel,))

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective."""
        return bool(self.group)

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return bool(self.over)

    @property
    def way(self) -> tuple[str, int]:
        """The direction of a send or receive: the axis, and the coordinate of the other end minus
        its own."""
        return self.over, self.by if self.kind == "send" else -self.by

    @property
    def is_copy(self) -> bool:
        """Whether it moves a value between host and device."""
        return bool(self.to)

    @property
    def record(self) -> str:
        """Its category, one of `NODE_KINDS`."""
        if self.is_message or self.is_copy:
            return self.kind
        return "coll" if self.is_collective else "comp"

    @property
    def is_computation(self) -> bool:
        """Whether it is a computation."""
        return not (self.group.axes or self.over or self.to)


@dataclass(slots=True)
class Stack:
    """The nodes of a stacked value, one item per iteration, and the index of the item that is
    complete last."""

    items: list[Ref]
    last: int


Ref = Node | Stack | None

#: Markers for the number of a microbatch in the name of a prototype: that of the first action of a
#: step, and of the second one if two overlap.
MICROBATCH = ("\0", "\1")


def marker_of(name: str) -> str:
    """The marker in a prototype's name, or ''."""
    return next((mark for mark in MICROBATCH if mark in name), "")


def numbered(name: str, microbatch: int) -> str:
    """The name of a node: that of its prototype with the number of the microbatch."""
    mark = marker_of(name)
    return name.replace(mark, str(microbatch)) if mark else name


@dataclass(frozen=True)
class Events:
    """Memory of a rank, node by node, in bytes. In addition to `static` bytes, node i + 1 allocates
    `alloc[i]` when it starts, and frees `free[i]` when it ends."""

    static: int
    alloc: Ints
    free: Ints

    @property
    def peak(self) -> int:
        """The most bytes in use while the nodes run one after the other."""
        before = np.cumsum(self.alloc - self.free) - (self.alloc - self.free)
        return self.static + int((before + self.alloc).max(initial=0))

    def merged(self, starts: Ints) -> Events:
        """The events of merged nodes: each index in `starts` begins a run of nodes that becomes
        one."""
        net = self.alloc - self.free
        after = np.cumsum(net)
        base = (after - net)[starts]
        lengths = np.diff(np.append(starts, len(net)))
        alloc = np.maximum.reduceat(after - net + self.alloc - np.repeat(base, lengths), starts)
        return Events(self.static, alloc, alloc - np.add.reduceat(net, starts))


@dataclass(frozen=True)
class Program:
    """The nodes of a class in the order of issue, as columns; identifiers start from 1.

    Node i + 1 is `prototypes[prototype[i]]` with `microbatch[i]` in its name and the tag `tag[i]`.
    It has data dependencies on the nodes `edges[starts[i] : control[i]]` and control dependencies
    on `edges[control[i] : starts[i + 1]]`. `events` is None unless memory was requested.
    """

    name: str
    prototypes: Sequence[Node]
    prototype: Ints
    microbatch: Ints
    tag: Ints
    starts: Ints
    control: Ints
    edges: Ints
    events: Events | None = None

    def __len__(self) -> int:
        return len(self.prototype)

    @cached_property
    def groups(self) -> list[GroupAxes]:
        """The groups of its collectives, in order of first use."""
        used, first = np.unique(self.prototype, return_index=True)
        order: list[int] = used[np.argsort(first)].tolist()
        groups = (self.prototypes[i].group for i in order)
        return list(dict.fromkeys(axes for axes in groups if axes))

    @cached_property
    def counts(self) -> Ints:
        """The number of nodes of each prototype."""
        return np.bincount(self.prototype, minlength=len(self.prototypes)).astype(np.int64)

    def named(self, names: Names) -> Program:
        """The program with other names. `short` leaves out phase, microbatch and layer; `none`
        leaves names empty; `chakra` prefixes each name with the type of the record, as Chakra's
        timeline tool expects: `COMP_NODE_forward/mb0/x`."""
        if names == "full":
            return self
        made: Mapping[Names, Callable[[Node], str]] = {
            "short": lambda n: n.name.removeprefix(n.scope),
            "none": lambda n: "",
            "chakra": lambda n: f"{_RECORDS[n.record]}_{n.name}",
        }
        given = map(made[names], self.prototypes)
        renamed = [replace(n, name=name) for n, name in zip(self.prototypes, given, strict=True)]
        return replace(self, prototypes=renamed)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes as objects with their edges. Slow and large: for small programs."""
        nodes = [self._node(i) for i in range(len(self))]
        for i, node in enumerate(nodes):
            targets: list[int] = self.edges[self.starts[i] : self.starts[i + 1]].tolist()
            edges = [nodes[e - 1] for e in targets]
            data = int(self.control[i] - self.starts[i])
            node.deps, node.after = edges[:data], edges[data:]
        return nodes

    def _node(self, i: int) -> Node:
        node = self.prototypes[int(self.prototype[i])]
        name = numbered(node.name, int(self.microbatch[i]))
        copied = replace(node, name=name, tag=int(self.tag[i]), id=i + 1)
        if self.events is not None:
            copied.alloc, copied.free = int(self.events.alloc[i]), int(self.events.free[i])
        return copied


def item(ref: Ref, i: int) -> Ref:
    """Slice `i` of a stacked value; any other value itself."""
    return ref.items[i] if isinstance(ref, Stack) else ref


def last_node(ref: Ref) -> Node | None:
    """The node of a value that is complete last, or None."""
    while isinstance(ref, Stack):
        ref = ref.items[ref.last]
    return ref
