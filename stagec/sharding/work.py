"""The work of an operation on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.kernel import KernelShape
from stagec.ir.opdef import factor_sizes
from stagec.ir.traits import CopiesMemory, Free
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import RecvOp, SendOp


class Work(NamedTuple):
    """What a computation does on one rank: FLOPs, those of matrix products, bytes touched; and its
    kernel, if that is a matrix product or attention."""

    flops: Expr
    matmul: Expr
    bytes: Expr
    kernel: KernelShape | None


def work_of(op: Operation) -> Work:
    """The work of a computation with local sizes."""
    definition, rule = op.definition, op.definition.rule(op)
    sizes = factor_sizes(op, rule, local=True) if rule is not None else {}
    flops, matmul = definition.flops(op, sizes), definition.matmul_flops(op, sizes)
    kernel = definition.kernel(op, sizes)
    return Work(flops, matmul, definition.bytes_touched(op), kernel)


def part_of_kernel(op: Operation, factor: str, part: Callable[[Expr], Expr]) -> KernelShape | None:
    """The kernel of a step that works on a part of a factor, local sizes."""
    rule = op.definition.rule(op)
    if rule is None:
        return None
    sizes = factor_sizes(op, rule, local=True)
    return op.definition.kernel(op, {**sizes, factor: part(sizes[factor])})


def is_computation(op: Operation) -> bool:
    """Whether an operation becomes a node that computes: it is no view, copy to or from the host,
    region, collective or message."""
    definition = op.definition
    if op.region is not None or op.has(Free) or op.has(CopiesMemory):
        return False
    return bool(op.results) and not isinstance(definition, Collective | SendOp | RecvOp)
