"""Nodes of a program and the values that stand for them while it is unrolled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """One node: a computation (`flops`, `size` bytes touched), a collective over `group` (`size`
    bytes of the full buffer), or one end of a message of `size` bytes.

    Computations wait for a `blocking` collective in the order of issue. A message goes along the
    axis `over` to the coordinate that is `by` more; `kind` is then `send` or `recv`, and both ends
    have the same `tag`.
    """

    kind: str
    name: str
    phase: str
    size: int
    flops: int = 0
    matmul: int = 0
    out: int = 0
    group: tuple[str, ...] = ()
    blocking: bool = False
    over: str = ""
    by: int = 0
    tag: int = 0
    deps: list[Node] = field(default_factory=list["Node"], repr=False)
    after: list[Node] = field(default_factory=list["Node"], repr=False)
    id: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether it communicates with a group."""
        return bool(self.group)

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message."""
        return bool(self.over)


@dataclass(slots=True)
class Stack:
    """The nodes of a stacked value, one for each iteration, and the one that is done last."""

    items: list[Ref]
    last: int


Ref = Node | Stack | None


@dataclass(slots=True)
class Program:
    """The nodes of a class in issue order, identified from 1."""

    name: str
    nodes: list[Node]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The axes over which its collectives go, in order of first use."""
        return list(dict.fromkeys(n.group for n in self.nodes if n.is_collective))


def item(ref: Ref, i: int) -> Ref:
    """Slice `i` of a stacked value; any other value is the same each time."""
    return ref.items[i] if isinstance(ref, Stack) else ref


def last_node(ref: Ref) -> Node | None:
    """The node that is done last of those that make a value."""
    while isinstance(ref, Stack):
        ref = ref.items[ref.last]
    return ref
