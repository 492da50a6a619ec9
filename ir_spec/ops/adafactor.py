"""Adafactor (arXiv 1804.04235) with the kernels of transformers.Adafactor: the second moments of a
matrix are means of its rows and columns."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule, parse_rule
from stagec.ir.traits import InPlace
from stagec.ir_spec.ops.base import SPEC, Elementwise, pointwise
from stagec.ir_spec.ops.structure import ratio


class AdafactorSquare(OpDef):
    """The square of a gradient plus `eps`, in fp32: 2 FLOPs per element. An optional second operand
    is a scalar factor of the gradient."""

    name = "stg.adafactor_square"
    operands = ("grad", "clip?")
    params = (Param("eps", "ratio", "added to the square (default 1e-30)"),)
    element_types = ("f32",)
    flops_per_point = 2
    example = "%s = stg.adafactor_square(%g) : f32[D, F]"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, scalars=len(op.operands) - 1)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        grad, *clip = args
        return [np.square(grad * clip[0] if clip else grad) + ratio(op, "eps", 1e-30)]


class DecayedMean(Elementwise):
    """beta2 * mean + (1 - beta2) * sum / count, in place: 3 FLOPs per element."""

    name = "stg.decayed_mean"
    operands = ("mean", "sum")
    traits = (InPlace(operands=(0,)),)
    params = (
        Param("count", "size", "the number of elements that were added up (default 1)"),
        Param("beta2", "ratio", "what is left of the mean (default 0.999)"),
    )
    flops_per_point = 3
    example = "%r2 = stg.decayed_mean[count = F](%r, %s) : f32[D]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        mean, added = args
        left = ratio(op, "beta2", 0.999)
        count = ctx.size(op.expr("count")) if "count" in op.attrs else 1
        return [left * mean + (1 - left) * added / count]


class AdafactorUpdate(OpDef):
    """A gradient divided by the root of its second moment, in fp32: g / sqrt(v), 2 FLOPs per
    element; for a matrix g / sqrt(row * column / mean of rows), 4 FLOPs per element, with the sum
    of `count` rows. With the flag `clip`, the last operand is a scalar factor of the gradient."""

    name = "stg.adafactor_update"
    operands = ("grad", "moments*")
    params = (
        Param("spec", "str", SPEC.doc, required=True, positional=True),
        Param("count", "size", "the number of rows that were added up"),
        Param("clip", "flag", "the gradient is scaled"),
    )
    element_types = ("f32",)
    flops_per_point = 4
    example = '%u = stg.adafactor_update["df,d,,f->df", count = D](%g, %r, %t, %c) : f32[D, F]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"))

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) - op.flag("clip") not in (2, 4):
            yield "expects a gradient and its moment, or rows, their sum and columns"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        grad = args[0] * args[-1] if op.flag("clip") else args[0]
        moments = args[1 : len(args) - op.flag("clip")]
        if len(moments) == 1:
            return [grad / np.sqrt(np.abs(moments[0]))]
        shapes, (out,) = parse_rule(op.text("spec"))
        row, mean, column = (
            _along(m, [f for g in s for f in g], [f for g in out for f in g])
            for m, s in zip(moments, shapes[1:4], strict=True)
        )
        mean = mean / ctx.size(op.expr("count"))
        return [grad / np.sqrt(np.abs(row / mean)) / np.sqrt(np.abs(column))]


def _along(array: Array, have: Sequence[str], wanted: Sequence[str]) -> Array:
    """An array with the dimensions of the factors `wanted`, of size one for those that it does not
    have."""
    sizes = dict(zip(have, array.shape, strict=True))
    return np.reshape(array, [sizes.get(f, 1) for f in wanted])


class AdafactorClip(OpDef):
    """An update times lr / max(1, its root mean square), in place, from the sum of `count` squares:
    2 FLOPs per element."""

    name = "stg.adafactor_clip"
    operands = ("update", "sum")
    traits = (InPlace(operands=(0,)),)
    params = (
        Param("count", "size", "the number of elements of the update", required=True),
        Param("lr", "ratio", "learning rate"),
    )
    flops_per_point = 2
    index = IndexRule("...,->...")
    example = "%u2 = stg.adafactor_clip[count = D*F](%u, %s) : f32[D, F]"

    def bytes_touched(self, op: Operation) -> Expr:
        return super().bytes_touched(op) * 2

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        update, squares = args
        root = np.sqrt(squares / ctx.size(op.expr("count")))
        return [update / np.maximum(1.0, root) * ratio(op, "lr", 3e-4)]
