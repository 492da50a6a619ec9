"""Nodes of a program and the values that stand for them while it is unrolled."""

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
#: What nodes are counted by: computations, collectives, ends of messages, copies to and from hosts.
NODE_KINDS = ("comp", "coll", "send", "recv", "store", "load")


#: The kind of a node that stands for what another step makes.
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
    """One node: a computation (`flops`, `size` bytes touched), a collective over `group` (`size`
    bytes of the full buffer), one end of a message of `size` bytes, or a copy of `size` bytes `to`
    the host or the device (`kind` is then `store` or `load`).

    A computation is one launch of a `kernel`; one that was merged of several has their kernels as
    `parts` instead. Computations wait for a `blocking` collective in the
    order of issue. A `bucket` is one call of a reduction in several, issued when its gradients are
    complete. `index` is its number among the calls, or else the layer, where sizes go by layers.
    `dealt`: of how many experts a token of an all_to_all is that goes to each node once, and of how
    many groups of these at most (0: of any); (0, 0) of others.
    `layer` is the place of its layer in the outermost stack, -1 outside of layers.
    `scope` is the leading part of the name: phase, microbatch and layer. A message goes
    along the axis `over` to the coordinate that is `by` more; `kind` is then `send` or `recv`, and
    both ends have the same `tag`. `alloc` and `free` are its
    bytes in `Events`, `op` is what it is a run of.
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
        """The launches of a computation."""
        return self.parts or (() if self.kernel is None else (self.kernel,))

    @property
    def is_collective(self) -> bool:
        """Whether it communicates with a group."""
        return bool(self.group)

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message."""
        return bool(self.over)

    @property
    def way(self) -> tuple[str, int]:
        """Of an end of a message: the axis, and the coordinate of the other end minus its own."""
        return self.over, self.by if self.kind == "send" else -self.by

    @property
    def is_copy(self) -> bool:
        """Whether it moves a value between host and device."""
        return bool(self.to)

    @property
    def record(self) -> str:
        """Which of `NODE_KINDS` it is."""
        if self.is_message or self.is_copy:
            return self.kind
        return "coll" if self.is_collective else "comp"

    @property
    def is_computation(self) -> bool:
        """Whether it computes."""
        return not (self.group.axes or self.over or self.to)


@dataclass(slots=True)
class Stack:
    """The nodes of a stacked value, one for each iteration, and the one that is done last."""

    items: list[Ref]
    last: int


Ref = Node | Stack | None

#: Stand for the number of a microbatch in the name of a prototype: that of the first action of a
#: step, and of the second one where two overlap.
MICROBATCH = ("\0", "\1")


def marker_of(name: str) -> str:
    """The marker in a prototype's name, or ''."""
    return next((mark for mark in MICROBATCH if mark in name), "")


def numbered(name: str, microbatch: int) -> str:
    """The name of a node of a microbatch: that of its prototype with the number of it."""
    mark = marker_of(name)
    return name.replace(mark, str(microbatch)) if mark else name


@dataclass(frozen=True)
class Events:
    """Memory of a rank, node by node: beside `static` bytes, node i + 1 holds `alloc[i]` more while
    it runs than was held before, and gives `free[i]` back at its end."""

    static: int
    alloc: Ints
    free: Ints

    @property
    def peak(self) -> int:
        """The most bytes while the nodes run one after the other."""
        before = np.cumsum(self.alloc - self.free) - (self.alloc - self.free)
        return self.static + int((before + self.alloc).max(initial=0))

    def merged(self, starts: Ints) -> Events:
        """Of runs of nodes, which begin at these places: each as one node."""
        net = self.alloc - self.free
        after = np.cumsum(net)
        base = (after - net)[starts]
        lengths = np.diff(np.append(starts, len(net)))
        alloc = np.maximum.reduceat(after - net + self.alloc - np.repeat(base, lengths), starts)
        return Events(self.static, alloc, alloc - np.add.reduceat(net, starts))


@dataclass(frozen=True)
class Program:
    """The nodes of a class in issue order, identified from 1, as columns.

    Node i + 1 is `prototypes[prototype[i]]` with `microbatch[i]` in its name and the tag `tag[i]`.
    It takes data from `edges[starts[i] : control[i]]` and is ordered after
    `edges[control[i] : starts[i + 1]]`, which are identifiers. `events` are there on request.
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
        """The axes over which its collectives go, in order of first use."""
        used, first = np.unique(self.prototype, return_index=True)
        order: list[int] = used[np.argsort(first)].tolist()
        groups = (self.prototypes[i].group for i in order)
        return list(dict.fromkeys(axes for axes in groups if axes))

    @cached_property
    def counts(self) -> Ints:
        """How many nodes each prototype stands for."""
        return np.bincount(self.prototype, minlength=len(self.prototypes)).astype(np.int64)

    def named(self, names: Names) -> Program:
        """The program with other names: `short` ones state what is computed, without phase,
        microbatch and layer; `none` leaves names out. `chakra` puts the type of the record before
        each, as Chakra's timeline tool wants it: `COMP_NODE_forward/mb0/x`."""
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
        """The nodes one by one, for a look at small programs."""
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
    """Slice `i` of a stacked value; any other value is the same each time."""
    return ref.items[i] if isinstance(ref, Stack) else ref


def last_node(ref: Ref) -> Node | None:
    """The node that is done last of those that make a value."""
    while isinstance(ref, Stack):
        ref = ref.items[ref.last]
    return ref
