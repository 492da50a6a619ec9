"""Copies of heads of keys and values that several heads of queries share."""

from collections.abc import Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.traits import Fusible
from stagec.ir_spec.ops.base import gradients


class RepeatHeads(OpDef):
    """Repeats each head, as `torch.repeat_interleave` along the heads: [B, S, G, K] becomes [B, S,
    H, K]. No FLOPs."""

    name = "stg.repeat_heads"
    traits = (Fusible(),)
    operands = ("x",)
    params = (Param("heads", "size", "the heads of the result", required=True),)
    example = "%y = stg.repeat_heads[heads = H](%k) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        times = op.expr("heads") / op.operands[0].tensor.dims[2].size
        return make_rule("bsgk->bs(gr)k", linear=[0], sizes={"r": times})

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        heads = op.operands[0].tensor.dims[2].size
        return gradients(b, op, grads, {"heads": heads}, by="stg.sum_heads")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        times = ctx.size(op.result.tensor.dims[2].local) // args[0].shape[2]
        return [np.repeat(args[0], times, axis=2)]


class SumHeads(OpDef):
    """Gradient of `stg.repeat_heads`: the sum over the copies of each head."""

    name = "stg.sum_heads"
    backward = True
    flops_per_point = 1
    operands = ("dy",)
    params = (Param("heads", "size", "the heads of the result", required=True),)
    example = "%dk = stg.sum_heads[heads = G](%q) : bf16[B, S, G, K]"

    def rule(self, op: Operation) -> Rule:
        return make_rule("bs(gr)k->bsgk", linear=[0], sizes={"g": op.expr("heads")})

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        b, s, _, k = args[0].shape
        heads = ctx.size(op.result.tensor.dims[2].local)
        return [args[0].reshape(b, s, heads, -1, k).sum(axis=3)]
