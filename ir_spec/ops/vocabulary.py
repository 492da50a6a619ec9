"""Ops over the vocabulary: embedding and cross entropy, with their forms over a split
vocabulary."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ZERO, Expr, const, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, LossForm, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.traits import Recasts, TakesLogits, Wide
from stagec.ir_spec.ops.base import gradients, need_result
from stagec.ir_spec.ops.loss_forms import (
    COMPILED,
    DEFAULT_CHUNKS,
    GIVEN_TYPE,
    MEAN,
    STEPS,
    LossOfLogits,
    logsumexp,
    one_hot,
    row_sums,
    target_of,
    with_head,
)
from stagec.ir_spec.ops.softmax import rsqrt_scale

_IN_PLACE = Param("in_place", "flag", "the gradient of the logits takes their buffer")


class Embedding(OpDef):
    """Looks up rows of a table. If the rows of the table are split, the lookup is masked and the
    result is a partial sum."""

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
    """Gradient of `stg.embedding`: adds up rows of dy by token, one FLOP per element of dy."""

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


class CrossEntropy(LossOfLogits):
    """Mean negative log-likelihood in fp32; the second result is the row log-sum-exp for backward.

    With a split vocabulary it becomes three all_reduces of [batch, sequence] in fp32: the maximum,
    the sum of exponentials, the target logit (arXiv 1909.08053). 5 FLOPs per logit. With the flag
    `in_place`, the gradient of the logits overwrites their buffer. With `steps`, the maximum, a
    subtraction, exponentials and their sum are separate kernels, which read a logit four times and
    write it twice (megatron/mpu/cross_entropy.py, `_VocabParallelCrossEntropy.forward`); the
    division of the softmax counts in its gradient. With `given_type`, the stock form has no tensor
    in fp32. With `compiled`, the kernel casts the logits that it reads.
    """

    name = "stg.cross_entropy"
    traits = (Wide(), TakesLogits())
    results = ("loss", "lse?")
    params = (MEAN, _IN_PLACE, STEPS, GIVEN_TYPE, COMPILED)
    index = IndexRule("...v,...->,...", special="v")
    element_types = ("f32", "f32")
    flops_per_point = 5
    example = "%loss = stg.cross_entropy[mean = B*S](%logits, %labels) : f32[]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if grads[0] is None:
            return [None, None]
        return gradients(b, op, [*op.operands, need_result(op, 1, "lse"), grads[0]])

    def bytes_touched(self, op: Operation) -> Expr:
        more = op.operands[0].tensor.local_bytes * 5 if op.flag(STEPS.name) else ZERO
        return super().bytes_touched(op) + more

    def expanded(self, b: Builder, op: Operation, form: LossForm) -> Value | None:
        logits, labels = op.operands
        mean = {"mean": op.expr("mean")}
        cast = logits.producer
        plain = cast.operands[0] if cast is not None and cast.has(Recasts) else logits
        match form.name:
            case "stock" if not form.split:
                given: dict[str, RawAttr] = {GIVEN_TYPE.name: True}
                flags = given if op.flag(GIVEN_TYPE.name) else {}
                logits = plain if flags else logits
                logp = b.value("stg.log_softmax", [logits], flags, hint=f"{logits.name}_logp")
                return b.value("stg.nll_loss", [logp, labels], mean, hint=op.result.name)
            case "compiled" if not form.split:
                op.attrs[COMPILED.name] = True
                op.set_operand(0, plain)
                return op.result
            case "stock" | "chunked" | "compiled":
                how: dict[str, RawAttr] = {}
                if chunked := form.name == "chunked":
                    how["chunks"] = const(form.chunks or DEFAULT_CHUNKS)
                elif form.name == "compiled":
                    how[COMPILED.name] = True
                operands = [plain if chunked else logits, labels]
                type_, hint = op.result.type, op.result.name
                attrs = {**mean, **how}
                return b.value("stg.saved_cross_entropy", operands, attrs, type=type_, hint=hint)
            case "in_place":
                op.attrs |= {_IN_PLACE.name: True, STEPS.name: True}
                return op.result
            case "fused_in_place":
                flags = {_IN_PLACE.name: True}
                return b.value("stg.cross_entropy", [plain, labels], {**mean, **flags})
            case "linear" if not form.split and (head := plain.producer) is not None:
                return with_head(b, op, head, form)
            case _:
                return None

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        top, exp = row_sums(b, op.operands[0], special["v"], steps=op.flag(STEPS.name))
        target = target_of(b, op, special["v"])
        mean = {"mean": op.expr("mean")}
        return b.op("stg.nll", [top, exp, target], mean, names=["loss", "lse"]).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logits, labels = args
        lse = logsumexp(logits)
        picked = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return [(lse - picked).sum() / ctx.size(op.expr("mean")), lse]


class CrossEntropyGrad(OpDef):
    """(softmax(logits) - onehot(labels)) * dloss / mean, 4 FLOPs per logit. With `steps`, separate
    kernels divide the softmax and multiply it later; each reads and writes it."""

    name = "stg.cross_entropy_grad"
    operands = ("logits", "labels", "lse", "dloss")
    params = (MEAN, _IN_PLACE, STEPS)
    index = IndexRule("...v,...,...,->...v")
    flops_per_point = 4

    def bytes_touched(self, op: Operation) -> Expr:
        more = op.operands[0].tensor.local_bytes * 2 if op.flag(STEPS.name) else ZERO
        return super().bytes_touched(op) + more

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.flag("in_place") else None

    example = (
        "%dl = stg.cross_entropy_grad[mean = B*S](%logits, %labels, %lse, %one) : bf16[B, S, V]"
    )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logits, labels, lse, dloss = args
        scale = dloss / ctx.size(op.expr("mean"))
        return [(np.exp(logits - lse[..., None]) - one_hot(op, ctx, logits, labels)) * scale]


class SumExp(OpDef):
    """Sum of exp((x - m) / sqrt(rsqrt)) over the last dimension, 3 FLOPs per element. With
    `steps` differences and exponentials are kernels, which read and write x."""

    name = "stg.sum_exp"
    operands = ("x", "m")
    params = (Param("rsqrt", "size", "scale by 1/sqrt of this"), STEPS)
    index = IndexRule("...v,...->...")
    element_types = ("f32",)
    flops_per_point = 3
    example = "%s = stg.sum_exp(%logits, %m) : f32[B, S]"

    def bytes_touched(self, op: Operation) -> Expr:
        more = op.operands[0].tensor.local_bytes * 4 if op.flag(STEPS.name) else ZERO
        return super().bytes_touched(op) + more

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, m = args
        return [np.exp((x - m[..., None]) * rsqrt_scale(op, ctx)).sum(-1)]


class Pick(OpDef):
    """The element of the last dimension at the index of the label; 0 if it is on another rank."""

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
    params = (MEAN,)
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
