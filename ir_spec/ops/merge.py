"""Tokens of images among those of text: replaces rows of one value by those of another."""

from collections.abc import Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.serving_step import ServingStep
from stagec.ir_spec.ops.base import gradients


class MergeRows(OpDef):
    """x [B, S, D] with row `where[b, s]` of `rows` [B, X, D] at the positions where this is below
    X. It inserts tokens of images into text (`masked_scatter` of embeddings in transformers).

    Copies, no FLOPs. Over a split sequence, each rank has all rows, and uses those of its
    positions.
    """

    name = "stg.merge_rows"
    operands = ("x", "rows", "where")
    index = IndexRule("bsd,bxd,bs->bsd", whole="x", linear=(0, 1))
    example = "%y = stg.merge_rows(%x, %h, %tokens) : bf16[B, S, D]"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """A decode step has only sampled tokens."""
        return [op.operands[0]] if step.mode == "decode" else None

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        x, rows = op.operands[:2]
        return rows.tensor.shape[1] + x.tensor.shape[1] if operand == 2 else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        attrs = {"size": op.operands[1].tensor.shape[1]}
        return gradients(b, op, [*grads, op.operands[2]], attrs)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, rows, where = args
        taken = where < rows.shape[1]
        taken_rows = np.take_along_axis(rows, np.where(taken, where, 0)[..., None], axis=1)
        return [np.where(taken[..., None], taken_rows, x)]


class MergeRowsGrad(OpDef):
    """Gradient of `stg.merge_rows`: dy at positions with their own row, and, for each of the `size`
    other rows, the sum of dy over its positions; 1 FLOP per element of dy."""

    name = "stg.merge_rows_grad"
    operands = ("dy", "where")
    results = ("dx", "drows")
    params = (Param("size", "size", "how many rows there are", required=True),)
    index = IndexRule("bsd,bs->bsd,bxd", whole="x", linear=(0,), sizes={"x": "size"})
    example = (
        "%dx, %dh = stg.merge_rows_grad[size = S](%de, %tokens) : (bf16[B, S, D], bf16[B, S, D])"
    )

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("size") + op.operands[0].tensor.shape[1] if operand == 1 else None

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return n["b"] * n["s"] * n["d"]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, where = args
        size = ctx.size(op.expr("size"))
        chosen = where[..., None] == np.arange(size)
        dx = np.where((where < size)[..., None], 0.0, dy)
        return [dx, np.einsum("bsx,bsd->bxd", chosen, dy)]
