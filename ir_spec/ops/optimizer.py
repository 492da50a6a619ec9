"""Optimizer ops: AdamW with an fp32 master copy, and the pieces of gradient-norm clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import AddsToSum, Fusible, InPlace, Stays
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.base import Elementwise
from stagec.ir_spec.ops.structure import ratio

_HYPER = (
    Param("lr", "ratio", "learning rate"),
    Param("beta1", "ratio", "decay of the first moment"),
    Param("beta2", "ratio", "decay of the second moment"),
    Param("decay", "ratio", "weight decay"),
    Param("eps", "ratio", "added to the root of the second moment"),
)


class AccumulateGrad(Elementwise):
    """The kernel that adds the gradient of a microbatch to the sum of those before it: 1 FLOP per
    element; it reads the gradient and the sum, and writes the sum, of element type `to`.

    The sum is what the `stg.accumulate` around it makes of its result, so by value it is a cast.
    The first microbatch adds to zeros. Partial sums pass: they are reduced in the type of the sum.
    """

    name = "stg.accumulate_grad"
    operands = ("grad",)
    traits = (AddsToSum(), Fusible(), Stays())
    linear = True
    params = (Param("to", "name", "the element type of the sum", required=True, positional=True),)
    example = "%s = stg.accumulate_grad[f32](%g) : f32[D]"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to")]

    def bytes_touched(self, op: Operation) -> Expr:
        return super().bytes_touched(op) + op.result.tensor.local_bytes

    def verify(self, op: Operation) -> Iterator[str]:
        if op.text("to") not in FLOATS:
            yield f"expects a floating-point type, found {op.text('to')}"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class AdamW(OpDef):
    """One AdamW step (arXiv 1711.05101) in place; 16 FLOPs per element.

    Operands: parameter, gradient, first and second moment; with the flag `master` the master copy,
    with the flag `clip` a factor for the gradient, a scalar. The parameter is rounded from the
    master copy.
    """

    name = "stg.adamw"
    operands = ("param", "grad", "m", "v", "master or clip*")
    results = ("param", "m", "v", "master?")
    traits = (InPlace(operands=(0, 2, 3, 4)),)
    params = (
        Param("master", "flag", "there is a master copy"),
        Param("clip", "flag", "the gradient is scaled"),
        *_HYPER,
    )
    flops_per_point = 16
    example = "%w2, %m2, %v2 = stg.adamw[clip](%w, %g, %m, %v, %clip) : (f32[D], f32[D], f32[D])"

    def rule(self, op: Operation) -> Rule:
        t = letters(op.operands[0].tensor.rank)
        same = 5 if op.flag("master") else 4
        tail = "," if op.flag("clip") else ""
        return make_rule(",".join([t] * same) + tail + "->" + ",".join([t] * (same - 1)))

    def verify(self, op: Operation) -> Iterator[str]:
        expected = 4 + op.flag("master") + op.flag("clip")
        if len(op.operands) != expected:
            yield f"expects {expected} operands, found {len(op.operands)}"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [
            op.operands[i].tensor.dtype for i in ((0, 2, 3, 4) if op.flag("master") else (0, 2, 3))
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        param, grad, m, v = args[:4]
        b1, b2 = ratio(op, "beta1", 0.9), ratio(op, "beta2", 0.95)
        g = grad * args[-1] if op.flag("clip") else grad
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        step = (m / (1 - b1)) / (np.sqrt(np.abs(v) / (1 - b2)) + ratio(op, "eps", 1e-8))
        old = args[4] if op.flag("master") else param
        new = old - ratio(op, "lr", 3e-4) * (step + ratio(op, "decay", 0.1) * old)
        return [new, m, v, new] if op.flag("master") else [new, m, v]


class SquaredNorm(OpDef):
    """Sum of squares in fp32, 2 FLOPs per element; a split dimension leaves a partial sum."""

    name = "stg.squared_norm"
    operands = ("x",)
    index = IndexRule("...->")
    element_types = ("f32",)
    flops_per_point = 2
    example = "%s = stg.squared_norm(%g) : f32[]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.square(args[0]).sum()]


class ClipFactor(OpDef):
    """min(1, max / sqrt(x)): the factor that clips a gradient of squared norm x; 3 FLOPs."""

    name = "stg.clip_factor"
    operands = ("x",)
    params = (Param("max", "ratio", "the largest norm", required=True),)
    index = IndexRule("->")
    flops_per_point = 3
    example = "%c = stg.clip_factor[max = 1](%s) : f32[]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.minimum(1.0, ratio(op, "max") / np.sqrt(args[0] + 1e-12))]
