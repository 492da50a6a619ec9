"""Losses other than cross entropy, and embeddings of numbers."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation
from stagec.ir.expr import evaluate
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir_spec.ops.base import gradients

_MEAN = Param("mean", "size", "the number of elements to average over", required=True, of_step=True)


class Mse(OpDef):
    """Mean of (x - y)^2 in fp32, 3 FLOPs per element. The target y has no gradient."""

    name = "stg.mse"
    operands = ("x", "target")
    params = (_MEAN,)
    index = IndexRule("...,...->")
    element_types = ("f32",)
    flops_per_point = 3
    example = "%loss = stg.mse[mean = B*S*D](%x, %h) : f32[]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*op.operands, *grads])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, target = args
        return [((x - target) ** 2).sum() / ctx.size(op.expr("mean"))]


class MseGrad(OpDef):
    """Gradient of `stg.mse`, 2 (x - y) * dloss / mean: 2 FLOPs per element."""

    name = "stg.mse_grad"
    operands = ("x", "target", "dloss")
    params = (_MEAN,)
    index = IndexRule("...,...,->...")
    flops_per_point = 2
    example = "%dx = stg.mse_grad[mean = B*S*D](%x, %h, %one) : bf16[B, S, D]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, target, dloss = args
        return [2 * (x - target) * dloss / ctx.size(op.expr("mean"))]


class Sinusoid(OpDef):
    """Cosines, then sines, of a number at `size`/2 frequencies, base^(-2 i / size): the embedding
    of the time step in diffusion models (arXiv 2006.11239). It has no gradient; 2 FLOPs per
    element."""

    name = "stg.sinusoid"
    operands = ("x",)
    params = (
        Param("size", "size", "elements of the result for each number", required=True),
        Param("base", "size", "the base of the frequencies (default 10000)"),
    )
    index = IndexRule("...->...v", sizes={"v": "size"})
    flops_per_point = 2
    example = "%e = stg.sinusoid[size = D](%time) : f32[B, D]"

    def verify(self, op: Operation) -> Iterator[str]:
        size = op.expr("size").value
        if size is not None and size % 2:
            yield f"expects an even size, found {size}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return [None]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        half = ctx.size(op.expr("size")) // 2
        place = np.asarray(ctx.positions(op.result.tensor.dims[-1]))
        base = float(evaluate(op.expr("base"), ctx.env)) if "base" in op.attrs else 10000.0
        angle = args[0][..., None] * base ** (-(place % half) / half)
        return [np.where(place < half, np.cos(angle), np.sin(angle))]
