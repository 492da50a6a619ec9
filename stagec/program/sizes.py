"""The bytes, FLOPs and kernels of lowered operations for given values of symbols.

A program is unrolled once for all values with which it has the same nodes; `OpNumbers.resized`
computes the nodes for other values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

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
#: The fields of a node that do not depend on sizes, in its order.
_BEFORE = attrgetter("kind", "name", "phase")
_BEHIND = attrgetter("parts", "group", "blocking", "bucket", "scope", "over", "by", "tag", "to")
_LAST = attrgetter("id", "index", "layer")
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
        self._ready: dict[Operation, Sequence[Sequence[GradientRun]]] = {}
        self._buckets: dict[Operation, list[int]] = {}
        self._works: dict[tuple[Operation, int], NodeWork] = {}

    def at(self, env: Mapping[str, int]) -> OpNumbers:
        """The numbers for other values; the order of gradients is determined once for all."""
        numbers = OpNumbers(env)
        numbers._ready = self._ready
        return numbers

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
        try:
            return self.number(op, name, layer)
        except NotAnIntegerError as problem:
            if problem.value is None:
                raise
            return ceil(problem.value)

    def buckets(self, op: Operation) -> list[int]:
        """The bytes of each call of a reduction in buckets."""
        if op not in self._buckets:
            if op not in self._ready:
                self._ready[op] = readiness(op)
            sizes = bucket_sizes(op, self._ready[op], self._env)
            self._buckets[op] = [sum(inside) for chunk in sizes for inside in chunk]
        return self._buckets[op]

    def resized(self, node: Node) -> Node:
        """The node of a program of another job with the same nodes, in these sizes and without
        edges. Raises `NotAnIntegerError` for sizes that do not divide."""
        if (op := node.op) is None:
            return node
        sizes: Sequence[Any] = (0, 0, 0, 0, None)  # bytes, FLOPs, those of products, result, kernel
        dealt = 0, 0
        if node.bucket:
            sizes = (self.buckets(op)[node.index], *sizes[1:])
        elif (old := node.kernel) is not None:
            size, flops, matmul, out = (self.number(op, name) for name in _NUMBERS)
            extents = tuple([self._extent(op, name, 0) for name in EXTENTS[old.kind]])
            kernel = Kernel(old.kind, old.dtype, extents, flops, size, *_KEPT(old))
            sizes = size, flops, matmul, out, kernel
        else:
            sizes = (self.number(op, "bytes"), *sizes[1:])
            dealt = self.number(op, "copies"), self.number(op, "groups")
        rest = 0, 0, op, (), (), *_LAST(node), dealt  # it allocates and frees nothing
        fields: list[Any] = [*_BEFORE(node), *sizes, *_BEHIND(node), *rest]
        return Node(*fields)


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
