"""Ops over the vocabulary: embedding and cross entropy, with what they become when it is split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Quoted, Value
from stagec.ir.expr import Expr, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import letters
from stagec.ir.traits import Wide
from stagec.ir_spec.ops.base import gradients, need_result
from stagec.ir_spec.ops.norm import rsqrt_scale

_MEAN = Param(
    "mean", "size", "the number of tokens to average over, such as B*S", required=True, of_step=True
)


class Embedding(OpDef):
    """Looks rows of a table up. A table split over its rows gives a masked lookup and a partial
    sum."""

    name = "stg.embedding"
    operands = ("table", "tokens")
    index = IndexRule("vx,...->...x")
    example = "%e = stg.embedding(%table, %tokens) : bf16[B, S, D]"

    def bytes_touched(self, op: Operation) -> Expr:
        out = op.result.tensor.local_bytes
        return out * 2 + op.operands[1].tensor.local_bytes

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        table, tokens = op.operands
        return gradients(b, op, [tokens, *grads], {"rows": table.tensor.shape[0]})

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[0] if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        table, tokens = args
        local = tokens - ctx.start(op.operands[0].tensor.dims[0])
        inside = (local >= 0) & (local < table.shape[0])
        return [np.where(inside[..., None], table[np.clip(local, 0, table.shape[0] - 1)], 0.0)]


class EmbeddingGrad(OpDef):
    """Adds rows of dy up per token, one FLOP per element of dy."""

    name = "stg.embedding_grad"
    operands = ("tokens", "dy")
    params = (Param("rows", "size", "the rows of the table", required=True),)
    index = IndexRule("...,...x->vx", sizes={"v": "rows"})
    element_types = ("dy",)
    example = "%dt = stg.embedding_grad[rows = V](%tokens, %de) : bf16[V, D]"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(size for f, size in n.items() if f != "v")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        tokens, dy = args
        rows = op.result.tensor.dims[0]
        out = np.zeros((ctx.size(rows.local), dy.shape[-1]))
        local = tokens - ctx.start(rows)
        inside = (local >= 0) & (local < out.shape[0])
        np.add.at(out, local[inside], dy[inside])
        return [out]


class CrossEntropy(OpDef):
    """Mean negative log-likelihood in fp32; the second result is the row log-sum-exp for backward.

    Where the vocabulary is split it becomes three all_reduces of [batch, sequence] in fp32: the
    maximum, the sum of exponentials, the target logit (arXiv 1909.08053). 5 FLOPs per logit.
    """

    name = "stg.cross_entropy"
    traits = (Wide(),)
    operands = ("logits", "labels")
    results = ("loss", "lse?")
    params = (_MEAN,)
    index = IndexRule("...v,...->,...", special="v")
    element_types = ("f32", "f32")
    flops_per_point = 5
    example = "%loss = stg.cross_entropy[mean = B*S](%logits, %labels) : f32[]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if grads[0] is None:
            return [None, None]
        return gradients(b, op, [*op.operands, need_result(op, 1, "lse"), grads[0]])

    def logits(self, op: Operation) -> Value:
        return op.operands[0]

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[-1] if operand == 1 else None

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        logits, labels = op.operands
        over = special["v"]
        kind: Mapping[str, tuple[str, ...]] = {"over": over}
        row = letters(logits.tensor.rank)
        spec = Quoted(f"{row}->{row[:-1]}")
        mine = b.value("stg.max", [logits], {"spec": spec, "to": "f32"}, hint="top")
        top = b.value("stg.all_reduce", [mine], {**kind, "kind": "max"}, hint="row_max")
        part = b.value("stg.sum_exp", [logits, top], hint="part_sum")
        exp = b.value("stg.all_reduce", [part], kind, hint="row_sum")
        picked = b.value("stg.pick", [logits, labels], hint="part_target")
        target = b.value("stg.all_reduce", [picked], kind, hint="target")
        return b.op(
            "stg.nll", [top, exp, target], {"mean": op.expr("mean")}, names=["loss", "lse"]
        ).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logits, labels = args
        lse = _logsumexp(logits)
        picked = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return [(lse - picked).sum() / ctx.size(op.expr("mean")), lse]


def _logsumexp(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return (np.log(np.exp(x - top).sum(-1, keepdims=True)) + top)[..., 0]


class CrossEntropyGrad(OpDef):
    """(softmax(logits) - onehot(labels)) * dloss / mean, 4 FLOPs per logit."""

    name = "stg.cross_entropy_grad"
    operands = ("logits", "labels", "lse", "dloss")
    params = (_MEAN,)
    index = IndexRule("...v,...,...,->...v")
    flops_per_point = 4
    example = (
        "%dl = stg.cross_entropy_grad[mean = B*S](%logits, %labels, %lse, %one) : bf16[B, S, V]"
    )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logits, labels, lse, dloss = args
        words: int = logits.shape[-1]
        onehot = labels[..., None] - ctx.start(op.operands[0].tensor.dims[-1]) == np.arange(words)
        scale = dloss / ctx.size(op.expr("mean"))
        return [(np.exp(logits - lse[..., None]) - onehot) * scale]


class LogSoftmax(OpDef):
    """x - logsumexp(x) over the last dimension, in fp32; 4 FLOPs per element."""

    name = "stg.log_softmax"
    traits = (Wide(),)
    operands = ("x",)
    index = IndexRule("...v->...v", whole="v")
    element_types = ("f32",)
    flops_per_point = 4
    example = "%logp = stg.log_softmax(%logits) : f32[B, S, V]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [op.result, grads[0]])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] - _logsumexp(args[0])[..., None]]


class LogSoftmaxGrad(OpDef):
    """dlogp - exp(logp) * sum(dlogp), in fp32; 4 FLOPs per element."""

    name = "stg.log_softmax_grad"
    operands = ("logp", "dlogp")
    index = IndexRule("...v,...v->...v", whole="v")
    element_types = ("f32",)
    flops_per_point = 4
    example = "%dz = stg.log_softmax_grad(%logp, %dlogp) : f32[B, S, V]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, dlogp = args
        return [dlogp - np.exp(logp) * dlogp.sum(-1, keepdims=True)]


class NllLoss(OpDef):
    """Mean of the negative log-probabilities that the labels name; 1 FLOP per token."""

    name = "stg.nll_loss"
    traits = (Wide(),)
    operands = ("logp", "labels")
    params = (_MEAN,)
    index = IndexRule("...v,...->", whole="v")
    element_types = ("f32",)
    example = "%loss = stg.nll_loss[mean = B*S](%logp, %labels) : f32[]"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(size for f, size in n.items() if f != "v")

    def bytes_touched(self, op: Operation) -> Expr:
        return op.operands[1].tensor.local_bytes * 2

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*op.operands, grads[0]])

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[-1] if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, labels = args
        picked = np.take_along_axis(logp, labels[..., None], -1)
        return [-picked.sum() / ctx.size(op.expr("mean"))]


class NllLossGrad(OpDef):
    """-dloss / mean where the label is, else 0: writes a tensor of the size of logp, of which it
    reads nothing."""

    name = "stg.nll_loss_grad"
    operands = ("logp", "labels", "dloss")
    params = (_MEAN,)
    index = IndexRule("...v,...,->...v", whole="v")
    element_types = ("f32",)
    flops_per_point = 0
    example = "%dlogp = stg.nll_loss_grad[mean = B*S](%logp, %labels, %one) : f32[B, S, V]"

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes + op.operands[1].tensor.local_bytes

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, labels, dloss = args
        words: int = logp.shape[-1]
        onehot = labels[..., None] == np.arange(words)
        return [onehot * (-dloss / ctx.size(op.expr("mean")))]


class SumExp(OpDef):
    """Sum of exp((x - m) / sqrt(rsqrt)) over the last dimension, 3 FLOPs per element."""

    name = "stg.sum_exp"
    operands = ("x", "m")
    params = (Param("rsqrt", "size", "scale by 1/sqrt of this"),)
    index = IndexRule("...v,...->...")
    element_types = ("f32",)
    flops_per_point = 3
    example = "%s = stg.sum_exp(%logits, %m) : f32[B, S]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, m = args
        return [np.exp((x - m[..., None]) * rsqrt_scale(op, ctx)).sum(-1)]


class Pick(OpDef):
    """The element of the last dimension that the label names; 0 where another rank holds it."""

    name = "stg.pick"
    operands = ("x", "labels")
    index = IndexRule("...v,...->...")
    element_types = ("f32",)
    example = "%t = stg.pick(%logits, %labels) : f32[B, S]"

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes * 2 + op.operands[1].tensor.local_bytes

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, labels = args
        local = labels - ctx.start(op.operands[0].tensor.dims[-1])
        inside = (local >= 0) & (local < x.shape[-1])
        picked = np.take_along_axis(x, np.clip(local, 0, x.shape[-1] - 1)[..., None], -1)[..., 0]
        return [np.where(inside, picked, 0.0)]


class Nll(OpDef):
    """Mean of log(sum) + max - target, and the log-sum-exp; 4 FLOPs per row."""

    name = "stg.nll"
    operands = ("max", "sum", "target")
    results = ("loss", "lse")
    params = (_MEAN,)
    index = IndexRule("...,...,...->,...")
    flops_per_point = 4
    example = "%loss, %lse = stg.nll[mean = B*S](%m, %s, %t) : (f32[], f32[B, S])"

    def verify(self, op: Operation) -> Iterator[str]:
        if {v.tensor.dtype for v in op.operands} != {"f32"}:
            yield "works on f32"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        top, exp, target = args
        lse = np.log(exp) + top
        return [(lse - target).sum() / ctx.size(op.expr("mean")), lse]
