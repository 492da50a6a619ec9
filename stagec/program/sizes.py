"""How large nodes are: bytes, FLOPs and kernels of lowered operations, for known sizes.

A program is unrolled once for all sizes with which it has the same nodes; what each of them is in
other sizes, `Resizable` says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr, evaluate, function
from stagec.ir.kernel import MEMORY
from stagec.program.buckets import GradientRun, bucket_sizes, readiness
from stagec.program.groups import crosses_pods
from stagec.program.kernels import EXTENTS, Kernel
from stagec.program.nodes import Node
from stagec.support.diagnostics import NotAnIntegerError

#: The parameters of an operation that are its numbers.
_NUMBERS = ("bytes", "flops", "matmul", "out")
_DEALT = ("copies", "groups")


@dataclass(frozen=True)
class Layered:
    """Sizes that differ from layer to layer; `slot` is the place of the stage among those that
    share the program."""

    at: Callable[[int], Mapping[str, Fraction]]
    slot: int


class NodeWork(NamedTuple):
    """What a computation is: its kind and phase, bytes, FLOPs, those of matrix products, bytes of
    its result, and its kernel."""

    kind: str
    phase: str
    size: int
    flops: int
    matmul: int
    out: int
    kernel: Kernel


class OpNumbers:
    """The numbers of operations for these values of all symbols; each is found once.

    Numbers raise `NotAnIntegerError` for sizes that do not divide.
    """

    def __init__(self, env: Mapping[str, int], loads: Layered | None = None) -> None:
        self._env, self._loads = env, loads
        self._known: dict[tuple[Expr, int], int] = {}
        self._buckets: dict[Operation, list[int]] = {}
        self._works: dict[tuple[Operation, int], NodeWork] = {}

    def number(self, op: Operation, name: str, layer: int = 0) -> int:
        """What a parameter of an operation is in a layer; 0 if it is not stated."""
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
        """What a computation is in a layer."""
        key = op, layer if self._loads is not None else 0
        if key not in self._works:
            size, flops, matmul, out = (self.number(op, name, layer) for name in _NUMBERS)
            kernel = self._kernel(op, layer)
            self._works[key] = NodeWork(op.text("kind"), op.phase, size, flops, matmul, out, kernel)
        return self._works[key]

    def _kernel(self, op: Operation, layer: int) -> Kernel:
        kind, dtype, names, what, causal, form = _about(op)
        extents = tuple(self._extent(op, name, layer) for name in names)
        flops, size = (self.number(op, name, layer) for name in ("flops", "bytes"))
        return Kernel(kind, dtype, extents, flops, size, what, causal, form)

    def _extent(self, op: Operation, name: str, layer: int) -> int:
        """An extent of a kernel, rounded up: the rows of an expert are those of the mean one."""
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
    """A kernel by the places of its numbers."""

    kind: str
    dtype: str
    extents: tuple[int, ...]
    flops: int
    bytes: int
    op: str
    causal: bool
    form: str


#: The fields of a node that are the same in other sizes.
_SAME = (
    *("kind", "name", "phase", "parts", "group", "blocking", "bucket", "scope", "over", "by"),
    *("tag", "to", "op", "id", "index", "layer"),
)


class _NodePlaces(NamedTuple):
    """A node: the fields that stay the `same`, and the places of its numbers, and of its kernel; a
    call in buckets has its bytes from the operation."""

    node: Node
    same: Mapping[str, Any]
    size: int
    flops: int
    matmul: int
    out: int
    kernel: int | None
    dealt: tuple[int, int]


class Resizable:
    """Nodes whose sizes go by these symbols, and what they do in other sizes with which they have
    the same places in the program. Each expression is prepared once."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._places: dict[Expr, int] = {}
        #: Of each number whether it has to be whole: all but extents.
        self._whole: list[bool] = []
        self._kernels: dict[_KernelPlaces, int] = {}
        self._nodes = [self._sized(node) for node in nodes]
        cut = dict.fromkeys(node.op for node in nodes if node.bucket and node.op is not None)
        self._ready = {op: readiness(op) for op in cut}
        prepared = zip(self._places, self._whole, strict=True)
        self._prepared = [(expr, function(expr), whole) for expr, whole in prepared]

    def at(self, values: Mapping[str, int]) -> list[Node]:
        """The nodes in these sizes, without their edges. Raises `NotAnIntegerError` for sizes that
        do not divide."""
        n: list[int] = []
        for expr, evaluated, whole in self._prepared:
            number = evaluated(values)
            if whole and number.denominator != 1:
                raise NotAnIntegerError(str(expr), Fraction(number))
            n.append(ceil(number))
        kernels = [
            Kernel(kind, dtype, tuple([n[i] for i in extents]), n[flops], n[size], op, causal, form)
            for kind, dtype, extents, flops, size, op, causal, form in self._kernels
        ]
        buckets: dict[Operation, list[int]] = {}
        nodes: list[Node] = []
        for node, same, size, flops, matmul, out, kernel, dealt in self._nodes:
            if node.op is None:
                nodes.append(node)
                continue
            if node.bucket and node.op not in buckets:
                buckets[node.op] = _calls(node.op, self._ready[node.op], values)
            nodes.append(
                Node(
                    **same,
                    size=buckets[node.op][node.index] if node.bucket else n[size],
                    flops=n[flops],
                    matmul=n[matmul],
                    out=n[out],
                    kernel=None if kernel is None else kernels[kernel],
                    dealt=(n[dealt[0]], n[dealt[1]]),
                )
            )
        return nodes

    def _sized(self, node: Node) -> _NodePlaces:
        op, place = node.op, self._place
        about = node, {name: getattr(node, name) for name in _SAME}
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
        kind, dtype, names, what, causal, form = _about(op)
        extents = tuple(self._place(op, name, whole=False) for name in names)
        flops, size = self._place(op, "flops"), self._place(op, "bytes")
        key = _KernelPlaces(kind, dtype, extents, flops, size, what, causal, form)
        return self._kernels.setdefault(key, len(self._kernels))

    def _place(self, op: Operation, name: str, *, whole: bool = True) -> int:
        return self._number(op.expr(name) if name in op.attrs else ZERO, whole=whole)

    def _number(self, expr: Expr, *, whole: bool = True) -> int:
        place = self._places.setdefault(expr, len(self._places))
        if place == len(self._whole):
            self._whole.append(False)
        self._whole[place] = self._whole[place] or whole
        return place


def what_it_does(node: Node) -> Hashable:
    """What is equal for nodes that do the same in all sizes: their numbers as expressions, and whom
    they reach."""
    op = node.op
    if op is None or node.bucket:
        return op or node, node.index
    values = [op.attrs.get(name) for name in (*_NUMBERS, *_DEALT)]
    if node.is_computation:
        about = _about(op)
        values += [about[0], about[1], *(op.attrs.get(name) for name in about[2]), *about[3:]]
    reached = node.group, node.blocking, node.over, node.by, node.to, crosses_pods(op)
    return node.kind, *values, *reached, node.index


def _about(op: Operation) -> tuple[str, str, Sequence[str], str, bool, str]:
    """What is the same of a kernel in all sizes: its kind, its type, the names of its extents, what
    it computes, whether a mask is causal, and its name in a library."""
    kind = op.text("kernel", MEMORY)
    what = "+".join(op.names("fuses")) or op.text("kind")
    return kind, op.text("dtype"), EXTENTS[kind], what, op.flag("causal"), op.text("form")


def _calls(
    op: Operation, ready: Sequence[Sequence[GradientRun]], env: Mapping[str, int]
) -> list[int]:
    """The bytes of each call of a reduction in buckets."""
    return [sum(inside) for chunk in bucket_sizes(op, ready, env) for inside in chunk]
