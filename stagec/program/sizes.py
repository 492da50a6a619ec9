"""The bytes, FLOPs and kernels of lowered operations for given values of symbols.

A program is unrolled once for all values with which it has the same nodes; `Resized` computes the
nodes for other values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, evaluate
from stagec.ir.kernel import MEMORY
from stagec.program.buckets import GradientRun, bucket_sizes, readiness
from stagec.program.groups import crosses_pods
from stagec.program.kernels import EXTENTS, Kernel
from stagec.program.nodes import Node
from stagec.support.diagnostics import NotAnIntegerError

#: The attributes of an operation that become numbers of its node.
_NUMBERS = ("bytes", "flops", "matmul", "out")
_DEALT = ("copies", "groups")
#: The place of a number that a node does not have.
_ZERO = -1
#: The fields of a node that do not depend on sizes, in its order.
_BEFORE = attrgetter("kind", "name", "phase")
_BEHIND = attrgetter("parts", "group", "blocking", "bucket", "scope", "over", "by", "tag", "to")
_LAST = attrgetter("id", "index", "layer")
#: Coordinates of ranks, by axis.
Coordinates: TypeAlias = tuple[tuple[str, int], ...]
_KEPT = attrgetter("op", "causal", "form", "windowed", "transposed")  # of a kernel


@dataclass(frozen=True)
class Layered:
    """Sizes that differ from layer to layer: `at` returns the values of symbols in a layer; `slot`
    is the index of the stage among those that share the graph."""

    at: Callable[[int], Mapping[str, Fraction]]
    slot: int


class NodeWork(NamedTuple):
    """The numbers of a computation: its kind and phase, bytes, FLOPs, FLOPs of matrix products,
    bytes of its result, and its kernel."""

    kind: str
    phase: str
    size: int
    flops: int
    matmul: int
    out: int
    kernel: Kernel


class OpNumbers:
    """The numbers of operations for the values `env` of all symbols, cached.

    Methods raise `NotAnIntegerError` for sizes that do not divide.
    """

    def __init__(self, env: Mapping[str, int], loads: Layered | None = None) -> None:
        self._env, self._loads = env, loads
        self._known: dict[tuple[Expr, int], int] = {}
        self._buckets: dict[Operation, list[int]] = {}
        self._works: dict[tuple[Operation, int], NodeWork] = {}

    def number(self, op: Operation, name: str, layer: int = 0) -> int:
        """The value of an attribute in a layer; 0 if the operation does not have it."""
        if name not in op.attrs:
            return 0
        expr = op.expr(name)
        key = expr, layer if self._loads is not None else 0
        if key not in self._known:
            env: Mapping[str, int | Fraction] = self._env
            if self._loads is not None:
                env = {**env, **self._loads.at(layer)}
            self._known[key] = evaluate(expr, env)
        return self._known[key]

    def work(self, op: Operation, layer: int = 0) -> NodeWork:
        """The numbers of a computation in a layer."""
        key = op, layer if self._loads is not None else 0
        if key not in self._works:
            size, flops, matmul, out = (self.number(op, name, layer) for name in _NUMBERS)
            kind, dtype, names, what, rest = _about(op)
            extents = tuple(self._extent(op, name, layer) for name in names)
            kernel = Kernel(kind, dtype, extents, flops, size, what, *rest)
            self._works[key] = NodeWork(op.text("kind"), op.phase, size, flops, matmul, out, kernel)
        return self._works[key]

    def _extent(self, op: Operation, name: str, layer: int) -> int:
        """An extent of a kernel, rounded up: the mean number of rows of an expert need not be
        whole."""
        return _rounded_up(lambda: self.number(op, name, layer))

    def buckets(self, op: Operation) -> list[int]:
        """The bytes of each call of a reduction in buckets."""
        if op not in self._buckets:
            self._buckets[op] = _bucket_bytes(op, readiness(op), self._env)
        return self._buckets[op]


class _Row(NamedTuple):
    """What a node has in all sizes: the places of its numbers and of the extents of its kernel, the
    order of its gradients, and the properties between these."""

    numbers: Sequence[int]
    extents: Sequence[int]
    ready: tuple[Operation, Coordinates] | None
    before: tuple[Any, ...]
    kept: tuple[Any, ...]
    behind: tuple[Any, ...]
    last: tuple[Any, ...]


class Resized:
    """Nodes in any sizes, without edges. What they have in all sizes is looked up once. `coords`
    are the coordinates on which the sizes of each depend, by default none."""

    def __init__(self, nodes: Sequence[Node], coords: Sequence[Coordinates] = ()) -> None:
        self._nodes = nodes
        #: The places of expressions; some are rounded up.
        self._asked: dict[tuple[Expr, Coordinates, bool], int] = {}
        self._ready: dict[tuple[Operation, Coordinates], Sequence[Sequence[GradientRun]]] = {}
        each = zip(nodes, coords or [()] * len(nodes), strict=True)
        self._rows = [self._row(node, at) for node, at in each]

    def _row(self, node: Node, at: Coordinates) -> _Row | None:
        if (op := node.op) is None:
            return None
        old = node.kernel
        names = (*_NUMBERS, "", "") if old is not None else ("bytes", "", "", "", *_DEALT)
        extents = EXTENTS[old.kind] if old is not None else ()
        if node.bucket and (op, at) not in self._ready:
            self._ready[op, at] = readiness(op)
        return _Row(
            [self._place(op, "" if node.bucket else name, at) for name in names],
            [self._place(op, name, at, rounded=True) for name in extents],
            (op, at) if node.bucket else None,
            _BEFORE(node),
            _KEPT(old) if old is not None else (),
            _BEHIND(node),
            _LAST(node),
        )

    def _place(self, op: Operation, name: str, at: Coordinates, *, rounded: bool = False) -> int:
        if name not in op.attrs:
            return _ZERO
        return self._asked.setdefault((op.expr(name), at, rounded), len(self._asked))

    def at(self, values: Mapping[str, int]) -> list[Node]:
        """The nodes for these values of all symbols, in order. Raises `NotAnIntegerError` for sizes
        that do not divide."""
        envs = {at: {**values, **dict(at)} for at in {at for _, at, _ in self._asked}}
        numbers = [
            _rounded_up(partial(evaluate, size, envs[at])) if up else evaluate(size, envs[at])
            for size, at, up in self._asked
        ]
        numbers.append(0)
        buckets = {
            (op, at): _bucket_bytes(op, ready, {**values, **dict(at)})
            for (op, at), ready in self._ready.items()
        }
        made: list[Node] = []
        for node, row in zip(self._nodes, self._rows, strict=True):
            if row is None:
                made.append(node)
                continue
            size, flops, matmul, out, *dealt = [numbers[i] for i in row.numbers]
            if row.ready is not None:
                size = buckets[row.ready][node.index]
            kernel = None
            if (old := node.kernel) is not None:
                extents = tuple([numbers[i] for i in row.extents])
                kernel = Kernel(old.kind, old.dtype, extents, flops, size, *row.kept)
            about = size, flops, matmul, out, kernel, *row.behind
            rest = 0, 0, node.op, (), (), *row.last, (dealt[0], dealt[1])  # it allocates nothing
            made.append(Node(*row.before, *about, *rest))
        return made


def _bucket_bytes(
    op: Operation, ready: Sequence[Sequence[GradientRun]], env: Mapping[str, int]
) -> list[int]:
    """The bytes of each call of a reduction in buckets."""
    return [sum(inside) for chunk in bucket_sizes(op, ready, env) for inside in chunk]


def _rounded_up(size: Callable[[], int]) -> int:
    """A size that need not be whole, rounded up."""
    try:
        return size()
    except NotAnIntegerError as problem:
        if problem.value is None:
            raise
        return ceil(problem.value)


def what_it_does(node: Node, contents: Callable[[Operation], Sequence[Hashable]]) -> Hashable:
    """A key that is equal for nodes with equal work for all values of symbols: their numbers as
    expressions, and the group or peer. `contents` gives those of the buckets of a reduction."""
    op = node.op
    if op is None:
        return node
    if node.bucket:
        return node.kind, contents(op)[node.index], node.group, node.blocking
    values = [op.attrs.get(name) for name in (*_NUMBERS, *_DEALT)]
    if node.is_computation:
        about = _about(op)
        values += [about[0], about[1], *(op.attrs.get(name) for name in about[2]), *about[3:]]
    reached = node.group, node.blocking, node.over, node.by, node.to, crosses_pods(op)
    return node.kind, *values, *reached, node.index


def _about(op: Operation) -> tuple[str, str, Sequence[str], str, tuple[bool, str, bool, bool]]:
    """The properties of a kernel that do not depend on sizes: its kind, its element type, the names
    of its extents, its operation, and those of `Kernel` from `causal` on."""
    kind = op.text("kernel", MEMORY)
    what = "+".join(op.names("fuses")) or op.text("kind")
    rest = op.flag("causal"), op.text("form"), op.flag("windowed"), op.flag("transposed")
    return kind, op.text("dtype"), EXTENTS[kind], what, rest
