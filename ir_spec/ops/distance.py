"""Scores by distance that depend on the content, for disentangled attention."""

from collections.abc import Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir_spec.ops.base import gradients

_KEYS = Param("keys", "flag", "the products are those of the keys, not of the queries")
_MOST = Param("most", "size", "far distances share rows, by their logarithm, up to this one")


class ByDistance(OpDef):
    """Scores [B, H, S, T] of queries and keys from products [B, S, H, R] of the queries (with
    `keys`: [B, T, H, R] of the keys) with the vectors of R distances (DeBERTa, arXiv 2006.03654,
    equation 4); a gather, no FLOPs.

    Query i and key j use row R/2 + i - j, clamped to the first and the last row. With `most`, rows
    farther than R/4 from the middle represent logarithmically spaced distances up to `most`
    (DeBERTa-v2).
    """

    name = "stg.by_distance"
    operands = ("x",)
    params = (Param("size", "size", "tokens of the other side", required=True), _KEYS, _MOST)
    example = "%b = stg.by_distance[size = S, most = 512](%near) : bf16[B, H, S, S]"

    def rule(self, op: Operation) -> Rule:
        own, other = "ts" if op.flag("keys") else "st"
        sizes = {other: op.expr("size")}
        return make_rule(f"b{own}hr->bhst", whole="r", linear=[0], sizes=sizes)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, {"rows": op.operands[0].tensor.shape[3]})

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (x,) = args
        rows = _rows(op, ctx, op.result, x.shape[-1])
        heads = np.moveaxis(x, 2, 1)  # [b, h, own, r]
        rows = rows.T if op.flag("keys") else rows
        terms = np.take_along_axis(heads, np.broadcast_to(rows, heads.shape[:2] + rows.shape), -1)
        return [np.swapaxes(terms, -1, -2) if op.flag("keys") else terms]


class ByDistanceGrad(OpDef):
    """Gradient of `stg.by_distance`: for each row, the sum over all pairs that use it, 1 FLOP per
    pair."""

    name = "stg.by_distance_grad"
    operands = ("dy",)
    params = (Param("rows", "size", "the rows of distances", required=True), _KEYS, _MOST)
    example = "%dn = stg.by_distance_grad[rows = 64, most = 512](%ds) : bf16[B, S, H, 64]"

    def rule(self, op: Operation) -> Rule:
        own = "t" if op.flag("keys") else "s"
        sizes = {"r": op.expr("rows")}
        return make_rule(f"bhst->b{own}hr", whole="r", linear=[0], sizes=sizes)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in "bhst")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (dy,) = args
        count = ctx.size(op.expr("rows"))
        rows = _rows(op, ctx, op.operands[0], count)
        if op.flag("keys"):
            dy, rows = np.swapaxes(dy, -1, -2), rows.T
        out = np.stack([(dy * (rows == r)).sum(-1) for r in range(count)], axis=-1)
        return [np.moveaxis(out, 1, 2)]


def _rows(op: Operation, ctx: NumericContext, scores: Value, count: int) -> Array:
    """The row that each pair of a query and a key uses, [s, t]."""
    queries, keys = (np.asarray(ctx.positions(d)) for d in scores.tensor.dims[2:])
    back = queries[:, None] - keys[None, :]
    if "most" in op.attrs:
        near, most = count // 4, ctx.size(op.expr("most"))
        far = np.maximum(np.abs(back), near)
        grown = np.ceil(np.log(far / near) / np.log((most - 1) / near) * (near - 1)) + near
        back = np.where(np.abs(back) <= near, back, np.sign(back) * grown.astype(int))
    return np.clip(back + count // 2, 0, count - 1)
