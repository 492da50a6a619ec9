"""How large nodes are: bytes, FLOPs and kernels of lowered operations, for known sizes.

A program is unrolled once for all sizes with which it has the same nodes; what each of them is in
other sizes, `resized` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, evaluate
from stagec.ir.kernel import MEMORY
from stagec.program.buckets import bucket_sizes
from stagec.program.kernels import EXTENTS, Kernel
from stagec.program.nodes import Node
from stagec.support.diagnostics import NotAnIntegerError


@dataclass(frozen=True)
class Layered:
    """Sizes that differ from layer to layer; `slot` is the place of the stage among those that
    share the program."""

    at: Callable[[int], Mapping[str, Fraction]]
    slot: int


class Sizes:
    """The numbers of operations for these values of all symbols; each is found once.

    Numbers raise `NotAnIntegerError` for sizes that do not divide.
    """

    def __init__(self, env: Mapping[str, int], loads: Layered | None = None) -> None:
        self._env, self._loads = env, loads
        self._known: dict[tuple[Expr, int], int] = {}
        self._kernels: dict[tuple[Operation, int], Kernel] = {}
        self._buckets: dict[Operation, list[int]] = {}

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

    def kernel(self, op: Operation, layer: int = 0) -> Kernel:
        """The kernel of a computation in a layer."""
        key = op, layer if self._loads is not None else 0
        if key not in self._kernels:
            kind = op.text("kernel", MEMORY)
            self._kernels[key] = Kernel(
                kind,
                op.text("dtype"),
                tuple(self._extent(op, name, layer) for name in EXTENTS[kind]),
                self.number(op, "flops", layer),
                self.number(op, "bytes", layer),
                "+".join(op.names("fuses")) or op.text("kind"),
                op.flag("causal"),
            )
        return self._kernels[key]

    def _extent(self, op: Operation, name: str, layer: int) -> int:
        """An extent of a kernel, rounded up: the rows of an expert are those of the mean one."""
        try:
            return self.number(op, name, layer)
        except NotAnIntegerError as found:
            return ceil(found.value)

    def buckets(self, op: Operation) -> list[int]:
        """The bytes of each call of a reduction in buckets."""
        if op not in self._buckets:
            chunks = bucket_sizes(op, self._env)
            self._buckets[op] = [sum(inside) for chunk in chunks for inside in chunk]
        return self._buckets[op]


def resized(node: Node, sizes: Sizes) -> Node:
    """What a node does, in other sizes with which it has the same place in the program; without its
    edges."""
    op, layer = node.op, node.index
    if op is None:
        return node
    flops, matmul, out, kernel = 0, 0, 0, None
    size = sizes.buckets(op)[node.index] if node.bucket else sizes.number(op, "bytes", layer)
    if node.is_computation:
        flops, matmul, out = (sizes.number(op, name, layer) for name in ("flops", "matmul", "out"))
        kernel = sizes.kernel(op, layer)
    about = node.kind, node.name, node.phase, size, flops, matmul, out, kernel, node.parts
    how = node.group, node.blocking, node.bucket, node.scope, node.over, node.by, node.tag, node.to
    return Node(*about, *how, op=op, id=node.id, index=node.index)
