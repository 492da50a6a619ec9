"""Forms of the cross entropy: the operations that frameworks run instead of one op, and when they
compute gradients (`stg.loss`)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Expr, call, const, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, LossForm, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule, parse_rule
from stagec.ir.traits import TakesLogits, Wide
from stagec.ir.types import TensorType, Type
from stagec.ir_spec.ops.base import gradients, need_result, stated
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.structure import ConstantOp

MEAN = Param(
    "mean", "size", "the number of tokens to average over, such as B*S", required=True, of_step=True
)
#: torchtune.modules.loss.CEWithChunkedOutputLoss: num_output_chunks.
DEFAULT_CHUNKS = 8
#: For a loss and its log-softmax: software that does not cast them computes in 16 bits.
GIVEN_TYPE = Param("given_type", "flag", "model code computes it in the type of the logits")
#: For an in-place loss: each step is a separate kernel over the buffer of the logits.
STEPS = Param("steps", "flag", "each step is a kernel over the logits")
COMPILED = Param("compiled", "flag", "one kernel casts logits, judges them, and casts the gradient")
_CHUNKS = Param("chunks", "size", "parts of the tokens, one after the other (default 1)")


def logsumexp(x: Array) -> Array:
    """The logarithm of the sum of exponentials over the last dimension."""
    top = x.max(-1, keepdims=True)
    return (np.log(np.exp(x - top).sum(-1, keepdims=True)) + top)[..., 0]


def row_sums(
    b: Builder, logits: Value, over: tuple[str, ...], *, steps: bool = False
) -> tuple[Value, Value]:
    """The maximum of each row of logits that are split over axes, and the sum of exponentials
    relative to it (arXiv 1909.08053, section 3); with `steps`, in separate kernels."""
    row = letters(logits.tensor.rank)
    spec = f"{row}->{row[:-1]}"
    mine = b.value("stg.max", [logits], {"spec": spec, "to": "f32"}, hint="top")
    top = b.value("stg.all_reduce", [mine], {"over": over, "kind": "max"}, hint="row_max")
    flags: dict[str, RawAttr] = {STEPS.name: True} if steps else {}
    part = b.value("stg.sum_exp", [logits, top], flags, hint="part_sum")
    return top, b.value("stg.all_reduce", [part], {"over": over}, hint="row_sum")


def target_of(b: Builder, op: Operation, over: tuple[str, ...]) -> Value:
    """The logit of each label; `op` is a loss with split logits."""
    picked = b.value("stg.pick", op.operands, hint="part_target")
    return b.value("stg.all_reduce", [picked], {"over": over}, hint="target")


class OfLabels(OpDef):
    """Base of the losses of logits, or of their log-softmax, and labels."""

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[-1] if operand == 1 else None


class LossOfLogits(OfLabels):
    """Base of the losses of the next tokens."""

    operands = ("logits", "labels")

    def logits(self, op: Operation) -> Value:
        return op.operands[0]


def one_hot(op: Operation, ctx: NumericContext, values: Array, labels: Array) -> Array:
    """Whether each local element of a vocabulary is the label, for values like operand 0."""
    first = ctx.start(op.operands[0].tensor.dims[-1])
    tokens = np.arange(int(values.shape[-1]))
    return np.equal(labels[..., None] - first, tokens)


class LogSoftmax(OpDef):
    """x - logsumexp(x) over the last dimension, in fp32, or with `given_type` in the type of x; 4
    FLOPs per element."""

    name = "stg.log_softmax"
    traits = (Wide(), TakesLogits())
    operands = ("x",)
    params = (GIVEN_TYPE,)
    index = IndexRule("...v->...v", whole="v")
    element_types = ("f32",)
    flops_per_point = 4
    example = "%logp = stg.log_softmax(%logits) : f32[B, S, V]"

    def dtypes(self, op: Operation) -> Sequence[str]:
        given = op.operands[0].tensor.dtype
        return [given] if op.flag(GIVEN_TYPE.name) else super().dtypes(op)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [op.result, grads[0]])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] - logsumexp(args[0])[..., None]]


class LogSoftmaxGrad(OpDef):
    """dlogp - exp(logp) * sum(dlogp), in the type of logp; 4 FLOPs per element."""

    name = "stg.log_softmax_grad"
    operands = ("logp", "dlogp")
    index = IndexRule("...v,...v->...v", whole="v")
    element_types = ("logp",)
    flops_per_point = 4
    example = "%dz = stg.log_softmax_grad(%logp, %dlogp) : f32[B, S, V]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, dlogp = args
        return [dlogp - np.exp(logp) * dlogp.sum(-1, keepdims=True)]


class NllLoss(OfLabels):
    """The mean of the negative log-probabilities of the labels; 1 FLOP per token."""

    name = "stg.nll_loss"
    traits = (Wide(),)
    operands = ("logp", "labels")
    params = (MEAN,)
    index = IndexRule("...v,...->", whole="v")
    element_types = ("f32",)
    example = "%loss = stg.nll_loss[mean = B*S](%logp, %labels) : f32[]"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(size for f, size in n.items() if f != "v")

    def bytes_touched(self, op: Operation) -> Expr:
        return op.operands[1].tensor.local_bytes * 2

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*op.operands, grads[0]])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, labels = args
        picked = np.take_along_axis(logp, labels[..., None], -1)
        return [-picked.sum() / ctx.size(op.expr("mean"))]


class NllLossGrad(OpDef):
    """-dloss / mean at the label, 0 elsewhere: writes a tensor of the size of logp, without reading
    logp."""

    name = "stg.nll_loss_grad"
    operands = ("logp", "labels", "dloss")
    params = (MEAN,)
    index = IndexRule("...v,...,->...v", whole="v")
    element_types = ("logp",)
    flops_per_point = 0
    example = "%dlogp = stg.nll_loss_grad[mean = B*S](%logp, %labels, %one) : f32[B, S, V]"

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes + op.operands[1].tensor.local_bytes

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, labels, dloss = args
        return [one_hot(op, ctx, logp, labels) * (-dloss / ctx.size(op.expr("mean")))]


def with_head(b: Builder, op: Operation, head: Operation, form: LossForm) -> Value | None:
    """Replace a loss and the product of its logits by one op; None if the logits are not a product
    of a value and a matrix."""
    if not isinstance(head.definition, Einsum) or len(head.operands) != 2:
        return None
    shapes, (out,) = parse_rule(head.text("spec"))
    left, right = shapes
    vocabulary, hidden = out[-1], left[-1]
    if left != (*out[:-1], hidden) or {*right} != {vocabulary, hidden}:
        return None
    x, weight = head.operands
    chunks = const(form.chunks) if form.chunks else _linear_chunks(weight, right.index(vocabulary))
    attrs: dict[str, RawAttr] = {"mean": op.expr("mean"), "chunks": chunks}
    flags = (("rows", right[0] == vocabulary), ("frozen", weight.tensor.role == "frozen"))
    attrs |= {name: True for name, there in flags if there}
    operands, loss = [x, weight, op.operands[1]], op.result
    return b.value("stg.linear_cross_entropy", operands, attrs, type=loss.type, hint=loss.name)


def _linear_chunks(weight: Value, place: int) -> Expr:
    """The default number of parts of the tokens: the vocabulary divided by the width, rounded up,
    as in liger_kernel/ops/fused_linear_cross_entropy.py."""
    words, width = weight.tensor.shape[place], weight.tensor.shape[1 - place]
    return call("ceildiv", [words, width])


class SavedCrossEntropy(LossOfLogits):
    """Mean negative log-likelihood in fp32; the second result is the log-softmax, which backward
    uses. `chunks` parts of the tokens are computed one after the other; with `compiled`, backward
    is one kernel. 6 FLOPs per logit.

    With a split vocabulary, it is computed as in DTensor (loss_parallel of
    torch.distributed.tensor.parallel): all_reduces of the maximum, of the sum of exponentials and
    of the target's logit.
    """

    name = "stg.saved_cross_entropy"
    results = ("loss", "logp?")
    params = (MEAN, _CHUNKS, COMPILED)
    index = IndexRule("...v,...->,...v", special="v")
    element_types = ("f32", "f32")
    flops_per_point = 6
    example = "%loss = stg.saved_cross_entropy[mean = B*S](%logits, %labels) : f32[]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if grads[0] is None:
            return [None, None]
        attrs: dict[str, RawAttr] = {"to": op.operands[0].tensor.dtype, **stated(op, self.params)}
        operands = [need_result(op, 1, "logp"), op.operands[1], grads[0]]
        name = "stg.saved_cross_entropy_grad"
        names = ["d_logits", "d_logits_scratch"][: 1 if op.flag(COMPILED.name) else 2]
        made = b.op(name, operands, attrs, names=names)
        return [made.results[0], None]

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        top, exp = row_sums(b, op.operands[0], special["v"])
        logp = b.value("stg.log_probability", [op.operands[0], top, exp], hint="logp")
        target = target_of(b, op, special["v"])
        mean = {"mean": op.expr("mean")}
        return [b.op("stg.nll", [top, exp, target], mean, names=["loss", "lse"]).results[0], logp]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logits, labels = args
        logp = logits - logsumexp(logits)[..., None]
        picked = np.take_along_axis(logp, labels[..., None], -1)
        return [-picked.sum() / ctx.size(op.expr("mean")), logp]


class LogProbability(OpDef):
    """x - max - log(sum), in fp32: 2 FLOPs per element."""

    name = "stg.log_probability"
    operands = ("x", "max", "sum")
    index = IndexRule("...v,...,...->...v")
    element_types = ("f32",)
    flops_per_point = 2
    example = "%logp = stg.log_probability(%logits, %m, %s) : f32[B, S, V]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, top, exp = args
        return [x - (top + np.log(exp))[..., None]]


class SavedCrossEntropyGrad(OpDef):
    """(exp(logp) - onehot(labels)) * dloss / mean, 4 FLOPs per logit, in the type `to`. `scratch`
    are two fp32 tensors of the size of a chunk: the gradient of the log-softmax, and its
    exponential; absent with `compiled`."""

    name = "stg.saved_cross_entropy_grad"
    operands = ("logp", "labels", "dloss")
    results = ("result", "scratch?")
    params = (
        MEAN,
        _CHUNKS,
        COMPILED,
        Param("to", "name", "the element type of the result", required=True),
    )
    flops_per_point = 4
    example = (
        "%dz, %s = stg.saved_cross_entropy_grad[mean = B*S, to = f32](%logp, %labels, %one) : "
        "(f32[B, S, V], f32[2, B, S, V])"
    )

    def rule(self, op: Operation) -> Rule:
        t = letters(op.operands[0].tensor.rank)
        if op.flag(COMPILED.name):
            return make_rule(f"{t},{t[:-1]},->{t}")
        return make_rule(f"{t},{t[:-1]},->{t},z{t}", sizes={"z": const(2)})

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(size for f, size in n.items() if f != "z") * 4

    def infer(self, op: Operation) -> list[Type]:
        result, *scratch = super().infer(op)
        return [result, *(_of_a_chunk(op, each) for each in scratch)]

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to"), "f32"]

    def bytes_touched(self, op: Operation) -> Expr:
        """The scratch is written and read once for each chunk."""
        logp, result = op.operands[0].tensor.local_bytes, op.results[0].tensor.local_bytes
        return logp * (1 if op.flag(COMPILED.name) else 5) + result

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logp, labels, dloss = args
        scale = dloss / ctx.size(op.expr("mean"))
        grad = (np.exp(logp) - one_hot(op, ctx, logp, labels)) * scale
        return [grad, *(np.zeros(ctx.shape(r)) for r in op.results[1:])]


def _of_a_chunk(op: Operation, scratch: Type) -> Type:
    """The type of a scratch for one chunk of the logits."""
    if "chunks" not in op.attrs or not isinstance(scratch, TensorType):
        return scratch
    *lead, tokens, words = scratch.dims
    part = replace(tokens, size=call("ceildiv", [tokens.size, op.expr("chunks")]))
    return replace(scratch, dims=(*lead, part, words))


class LinearCrossEntropy(OpDef):
    """The product of the head and the mean cross entropy of its logits, in `chunks` parts of the
    tokens. Each part computes its gradients immediately, in the buffer of the logits (Liger's
    LigerFusedLinearCrossEntropy): 6 FLOPs per logit and element of the width, and 9 per logit. With
    the flag `rows`, the vocabulary is the rows of the head; a `frozen` head has no gradient, which
    saves a third of the products. `scratch` is the logits of a chunk. Neither vocabulary nor width
    may be split.
    """

    name = "stg.linear_cross_entropy"
    operands = ("x", "head", "labels")
    results = ("loss", "dx?", "scratch?", "dhead?")
    params = (
        MEAN,
        _CHUNKS,
        Param("rows", "flag", "the vocabulary is the rows of the head"),
        Param("frozen", "flag", "the head has no gradient"),
    )
    example = "%loss = stg.linear_cross_entropy[mean = B*S, chunks = 8](%x, %w, %labels) : f32[]"

    def rule(self, op: Operation) -> Rule:
        t = letters(op.operands[0].tensor.rank - 1)
        head = "vx" if op.flag("rows") else "xv"
        last = "" if op.flag("frozen") else f",{head}"
        return make_rule(f"{t}x,{head},{t}->,{t}x,{t}v{last}", whole="xv")

    def dtypes(self, op: Operation) -> Sequence[str]:
        x, head = (v.tensor.dtype for v in op.operands[:2])
        return ["f32", x, x, head]

    def infer(self, op: Operation) -> list[Type]:
        loss, dx, scratch, *dhead = super().infer(op)
        return [loss, dx, _of_a_chunk(op, scratch), *dhead]

    def verify(self, op: Operation) -> Iterator[str]:
        if "chunks" not in op.attrs:
            yield "expects 'chunks'"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        logits = product(size for f, size in n.items() if f != "x")
        return self.matmul_flops(op, n) + logits * 9

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        products = 2 if op.flag("frozen") else 3
        return product(n[f] for f in self.rule(op).factors) * 2 * products

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        """One product with the FLOPs of all."""
        products = 2 if op.flag("frozen") else 3
        tokens = product(size for f, size in n.items() if f not in "xv")
        dtype = op.operands[0].tensor.dtype
        return KernelShape("matmul", dtype, (const(1), tokens, n["v"], n["x"] * products))

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        """The gradients that forward has computed, scaled if the gradient of the loss is not 1."""
        if grads[0] is None:
            return [None, None, None]
        names = ("dx", "scratch", "dhead")[: 2 if op.flag("frozen") else 3]
        results = {name: need_result(op, i, name) for i, name in enumerate(names, 1)}
        made = [v for name in ("dx", "dhead") if (v := results.get(name)) is not None]
        one = grads[0].producer
        if one is None or not isinstance(one.definition, ConstantOp) or one.expr("value") != ONE:
            made = [_scaled(b, value, grads[0]) for value in made]
        return [*made, *[None] * (3 - len(made))]

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        shape = op.operands[1].tensor.shape
        return shape[0 if op.flag("rows") else 1] if operand == 2 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, head, labels = args
        weight = head.T if op.flag("rows") else head
        logits = x @ weight
        logp = logits - logsumexp(logits)[..., None]
        mean = ctx.size(op.expr("mean"))
        loss = -np.take_along_axis(logp, labels[..., None], -1).sum() / mean
        words: int = weight.shape[1]
        onehot = labels[..., None] == np.arange(words)
        d = (np.exp(logp) - onehot) / mean
        tokens = list(range(labels.ndim))
        pair = (d, x) if op.flag("rows") else (x, d)
        dhead = np.tensordot(*pair, (tokens, tokens))
        if len(op.results) == 1:
            return [loss]
        scratch = np.zeros(ctx.shape(op.results[2]))
        return [loss, d @ weight.T, scratch, dhead][: len(op.results)]


def _scaled(b: Builder, value: Value, by: Value) -> Value:
    t = letters(value.tensor.rank)
    by = b.value("stg.cast", [by], {"to": value.tensor.dtype}, hint=f"{by.name}_cast")
    spec = f"{t},->{t}"
    return b.value("stg.einsum", [value, by], {"spec": spec}, hint=f"{value.name}_scaled")
