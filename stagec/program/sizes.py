"""The bytes, FLOPs and kernels of lowered operations for given values of symbols.

A program is unrolled once for all values with which it has the same nodes; `Resizable` computes the
nodes for other values.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr, evaluate, function
from stagec.ir.kernel import MEMORY
from stagec.program.buckets import GradientRun, bucket_sizes, readiness
from stagec.program.groups import crosses_pods
from stagec.program.kernels import EXTENTS, Kernel
from stagec.program.nodes import Node
from stagec.support.diagnostics import NotAnIntegerError

#: The attributes of an operation that become numbers of its node.
_NUMBERS = ("bytes", "flops", "matmul", "out")
_DEALT = ("copies", "groups")


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
            kernel = self._kernel(op, layer)
            self._works[key] = NodeWork(op.text("kind"), op.phase, size, flops, matmul, out, kernel)
        return self._works[key]

    def _kernel(self, op: Operation, layer: int) -> Kernel:
        kind, dtype, names, what, rest = _about(op)
        extents = tuple(self._extent(op, name, layer) for name in names)
        flops, size = (self.number(op, name, layer) for name in ("flops", "bytes"))
        return Kernel(kind, dtype, extents, flops, size, what, *rest)

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
            self._buckets[op] = _calls(op, readiness(op), self._env)
        return self._buckets[op]


class _KernelPlaces(NamedTuple):
    """A `Kernel` with the indices of its numbers."""

    kind: str
    dtype: str
    extents: tuple[int, ...]
    flops: int
    bytes: int
    op: str
    causal: bool
    form: str
    windowed: bool
    transposed: bool


#: The fields of a node that do not depend on sizes: those before and after its sizes.
_FIRST = attrgetter("kind", "name", "phase")
_LAST = attrgetter(
    *("parts", "group", "blocking", "bucket", "scope", "over", "by", "tag", "to", "alloc", "free"),
    *("op", "deps", "after", "id", "index", "layer"),
)


class _NodePlaces(NamedTuple):
    """A node with the fields that do not change (`first`, `last`), and the indices of its numbers
    and of its kernel. The bytes of a bucket come from the operation instead."""

    node: Node
    first: tuple[Any, ...]
    last: tuple[Any, ...]
    size: int
    flops: int
    matmul: int
    out: int
    kernel: int | None
    dealt: tuple[int, int]


class Resizable:
    """Computes the nodes of a program for other values of symbols with which it has the same nodes
    and edges. Each expression is compiled once."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._places: dict[Expr, int] = {}
        #: For each number, whether it must be whole: all but extents.
        self._whole: list[bool] = []
        self._kernels: dict[_KernelPlaces, int] = {}
        self._nodes = [self._sized(node) for node in nodes]
        cut = dict.fromkeys(node.op for node in nodes if node.bucket and node.op is not None)
        self._ready = {op: readiness(op) for op in cut}
        prepared = zip(self._places, self._whole, strict=True)
        self._prepared = [(expr, function(expr), whole) for expr, whole in prepared]

    def at(self, values: Mapping[str, int]) -> list[Node]:
        """The nodes for these values of symbols, without edges. Raises `NotAnIntegerError` for
        sizes that do not divide."""
        n: list[int] = []
        for expr, evaluated, whole in self._prepared:
            number = evaluated(values)
            if whole and number.denominator != 1:
                raise NotAnIntegerError(str(expr), Fraction(number))
            n.append(ceil(number))
        kernels = [
            Kernel(
                k.kind, k.dtype, tuple([n[i] for i in k.extents]), n[k.flops], n[k.bytes], *k[5:]
            )
            for k in self._kernels
        ]
        buckets: dict[Operation, list[int]] = {}
        nodes: list[Node] = []
        for node, first, last, size, flops, matmul, out, kernel, dealt in self._nodes:
            if node.op is None:
                nodes.append(node)
                continue
            if node.bucket and node.op not in buckets:
                buckets[node.op] = _calls(node.op, self._ready[node.op], values)
            fields: list[Any] = [
                *first,
                buckets[node.op][node.index] if node.bucket else n[size],
                *(n[flops], n[matmul], n[out]),
                None if kernel is None else kernels[kernel],
                *last,
                (n[dealt[0]], n[dealt[1]]),
            ]
            nodes.append(Node(*fields))
        return nodes

    def _sized(self, node: Node) -> _NodePlaces:
        op, place = node.op, self._place
        about = node, _FIRST(node), _LAST(replace(node, deps=(), after=(), alloc=0, free=0))
        none = self._number(ZERO)
        if op is None or node.bucket:
            return _NodePlaces(*about, none, none, none, none, None, (none, none))
        size = place(op, "bytes")
        if not node.is_computation:
            copies, groups = (place(op, name) for name in _DEALT)
            return _NodePlaces(*about, size, none, none, none, None, (copies, groups))
        flops, matmul, out = (place(op, name) for name in _NUMBERS[1:])
        return _NodePlaces(*about, size, flops, matmul, out, self._kernel(op), (none, none))

    def _kernel(self, op: Operation) -> int:
        kind, dtype, names, what, rest = _about(op)
        extents = tuple(self._place(op, name, whole=False) for name in names)
        flops, size = self._place(op, "flops"), self._place(op, "bytes")
        key = _KernelPlaces(kind, dtype, extents, flops, size, what, *rest)
        return self._kernels.setdefault(key, len(self._kernels))

    def _place(self, op: Operation, name: str, *, whole: bool = True) -> int:
        return self._number(op.expr(name) if name in op.attrs else ZERO, whole=whole)

    def _number(self, expr: Expr, *, whole: bool = True) -> int:
        place = self._places.setdefault(expr, len(self._places))
        if place == len(self._whole):
            self._whole.append(False)
        self._whole[place] = self._whole[place] or whole
        return place


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


def _calls(
    op: Operation, ready: Sequence[Sequence[GradientRun]], env: Mapping[str, int]
) -> list[int]:
    """The bytes of each call of a reduction in buckets."""
    return [sum(inside) for chunk in bucket_sizes(op, ready, env) for inside in chunk]
