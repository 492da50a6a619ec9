"""Residual streams that layers mix (hyper-connections, arXiv 2409.19606; constrained to a manifold,
arXiv 2512.24880): the weights with which a layer reads, writes and mixes them; and attention to the
streams after earlier layers."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir_spec.ops.base import gradients
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.layout import all_present

_STREAMS = Param("streams", "size", "the number of streams N", required=True, least=1)
_ITERATIONS = Param(
    "iterations", "int", "how often rows and columns are normalized (default: only `read`)", least=1
)
_PARAMS = (_STREAMS, _ITERATIONS)
_TO = Param("to", "name", "the element type of the weights (default f32)")
#: Letters of the weights that read, write and mix.
_RESULTS = ("bsn", "bsn", "bsnm")


class _Weights(OpDef):
    """Base class of the weights and their gradient."""

    params: ClassVar[tuple[Param, ...]] = _PARAMS

    def count(self, op: Operation) -> int:
        """The number of kinds of weights."""
        return 3 if "iterations" in op.attrs else 1

    def work(self, op: Operation, n: Sizes, each: int, normalized: int) -> Expr:
        """FLOPs of each logit, and of each element that an iteration normalizes."""
        count = n["n"] * (n["n"] + 2) if self.count(op) == 3 else n["n"]
        mixed = n["n"] * n["n"] * normalized * op.integer("iterations", 0)
        return n["b"] * n["s"] * (count * each + mixed)


class StreamWeights(_Weights):
    """The weights of N streams, from logits [B, S, W] in fp32: times one number of `scale` for each
    kind, plus `base` [W].

    With `iterations` W is N (N + 2) and `scale` has three numbers: `read` is a sigmoid of the first
    N logits, `write` twice a sigmoid of the next N, and `mix` [N, N] a softmax of the rows of the
    rest, whose columns, and in each further iteration rows and columns, are divided by their sums
    (Sinkhorn and Knopp). Otherwise W is N, and `read` is the only result. Small constants that are
    added are left out. FLOPs: 7 per logit, and 4 per iteration and element of `mix`.
    """

    name = "stg.stream_weights"
    operands = ("logits", "scale", "base")
    results = ("read", "write?", "mix?")
    params = (*_PARAMS, _TO)
    example = "%read = stg.stream_weights[streams = 4](%l, %s, %b) : f32[B, S, 4]"

    def rule(self, op: Operation) -> Rule:
        kinds = self.count(op)
        sizes = {"n": op.expr("streams"), **({"m": op.expr("streams")} if kinds == 3 else {})}
        whole = "wxnm" if kinds == 3 else "wxn"
        return make_rule("bsw,x,w->" + ",".join(_RESULTS[:kinds]), whole=whole, sizes=sizes)

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to", "f32")] * self.count(op)

    def verify(self, op: Operation) -> Iterator[str]:
        n, kinds = op.expr("streams"), self.count(op)
        logits = n * (n + 2) if kinds == 3 else n
        if op.operands[0].tensor.shape[-1] != logits:
            yield f"expects {logits} logits of a token, found {op.operands[0].type}"
        if op.operands[1].tensor.shape[0].value not in (None, kinds):
            yield f"expects {kinds} numbers as the scale, found {op.operands[1].type}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.work(op, n, 7, 4)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*all_present(op, grads), *op.operands])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        parts = _parts(op, ctx, *args)
        made = [sigmoid(parts[0])]
        if len(parts) == 3:
            made += [2 * sigmoid(parts[1]), _steps(parts[2], op.integer("iterations", 1))[-1]]
        return made


class StreamWeightsGrad(_Weights):
    """Gradient of `stg.stream_weights`, which computes them again: 12 FLOPs per logit, and 12
    per iteration and element of `mix`."""

    name = "stg.stream_weights_grad"
    operands = ("dread", "more*")
    results = ("dlogits", "dscale", "dbase")
    example = (
        "%dl, %ds, %db = stg.stream_weights_grad[streams = 4](%dr, %l, %s, %b) : "
        "(f32[B, S, 4], f32[1], f32[4])"
    )

    def rule(self, op: Operation) -> Rule:
        kinds = self.count(op)
        left = ",".join([*_RESULTS[:kinds], "bsw,x,w"])
        return make_rule(f"{left}->bsw,x,w", whole="wxnm" if kinds == 3 else "wxn")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [v.tensor.dtype for v in op.operands[-3:]]

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.work(op, n, 12, 12)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        *dys, logits, scale, base = args
        parts = _parts(op, ctx, logits, scale, base)
        grads = [dys[0] * _slope(parts[0])]
        if len(parts) == 3:
            steps = _steps(parts[2], op.integer("iterations", 1))
            grads += [dys[1] * 2 * _slope(parts[1]), _back(dys[2], steps)]
        lead = logits.shape[:2]
        flat = np.concatenate([g.reshape(*lead, -1) for g in grads], axis=-1)
        widths = [g[0, 0].size for g in grads]
        each = (flat * logits).sum((0, 1))
        ends = np.cumsum([0, *widths])
        dscale = [each[a:b].sum() for a, b in pairwise(ends)]
        return [flat * np.repeat(scale, widths), np.array(dscale), flat.sum((0, 1))]


def _parts(
    op: Operation, ctx: NumericContext, logits: Array, scale: Array, base: Array
) -> list[Array]:
    """The scaled logits that read, write and mix."""
    n = ctx.size(op.expr("streams"))
    widths = [n, n, n * n][: len(scale)]
    x = logits * np.repeat(scale, widths) + base
    parts = np.split(x, np.cumsum(widths)[:-1], axis=-1)
    return [*parts[:2], *(p.reshape(*p.shape[:2], n, n) for p in parts[2:])]


def _slope(x: Array) -> Array:
    s = sigmoid(x)
    return np.asarray(s * (1 - s))


def _steps(x: Array, iterations: int) -> list[Array]:
    """The softmax of rows, and the matrices after each further division by sums of columns (of axis
    -2) and rows, in turn."""
    e = np.exp(x - x.max(-1, keepdims=True))
    steps = [e / e.sum(-1, keepdims=True)]
    for number in range(2 * iterations - 1):
        last = steps[-1]
        steps.append(last / last.sum(-1 if number % 2 else -2, keepdims=True))
    return steps


def _back(dy: Array, steps: Sequence[Array]) -> Array:
    """The gradient of `_steps`."""
    for number in reversed(range(len(steps) - 1)):
        axis, y = -1 if number % 2 else -2, steps[number + 1]
        dy = (dy - (dy * y).sum(axis, keepdims=True)) / steps[number].sum(axis, keepdims=True)
    return np.asarray(steps[0] * (dy - (dy * steps[0]).sum(-1, keepdims=True)))


# -- residuals of earlier blocks -------------------------------------------------------------------

#: The first operands of `stg.attend_depth`: a row of the stream, and the vectors of its scores.
_ROWS = "bsd,d,d"


class _Depth(OpDef):
    """Base class of attention to residual streams and its gradient; it is bound by memory."""

    products: ClassVar[int]
    others: ClassVar[int]  # FLOPs of the norm and of sums, for each element of a row

    def streams(self, op: Operation) -> int:
        """The number of streams: that of this layer, and earlier ones."""
        raise NotImplementedError

    def flops(self, op: Operation, n: Sizes) -> Expr:
        rows = n["b"] * n["s"] * self.streams(op)
        return self.matmul_flops(op, n) + rows * (n["d"] * self.others + 5)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return n["b"] * n["s"] * self.streams(op) * n["d"] * (2 * self.products)

    def kernel(self, op: Operation, n: Sizes) -> None:
        return None


class AttendDepth(_Depth):
    """Attention of each token to its residual streams (attention residuals, arXiv 2607.24653): the
    average of `x` and of those after earlier blocks of layers, all [B, S, D], with a softmax of the
    products of their RMSNorms, scaled by `norm` [D], with the vector `query` [D] as weights.

    One kernel reads each stream once. FLOPs per stream and token: two products of D, 4 D of the
    norm, and 5 of the softmax.
    """

    name = "stg.attend_depth"
    operands = ("x", "norm", "query", "earlier*")
    example = "%y = stg.attend_depth(%x, %n, %q, %e) : bf16[B, S, D]"
    products = 2
    others = 4

    def streams(self, op: Operation) -> int:
        return len(op.operands) - 2

    def rule(self, op: Operation) -> Rule:
        return make_rule(_ROWS + ",bsd" * (len(op.operands) - 3) + "->bsd", whole="d")

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, *op.operands])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        values, _, _, weights = _attended(*args)
        return [np.einsum("bsnd,bsn->bsd", values, weights)]


class AttendDepthGrad(_Depth):
    """Gradient of `stg.attend_depth`, which computes its weights again: six products of D, 15 D of
    the norm and of sums, and 5 of the softmax for each stream and token."""

    name = "stg.attend_depth_grad"
    operands = ("dy", "x", "norm", "query", "earlier*")
    results = ("dx", "dnorm", "dquery", "dearlier*")
    example = (
        "%dx, %dn, %dq, %de = stg.attend_depth_grad(%dy, %x, %n, %q, %e) : "
        "(bf16[B, S, D], bf16[D], bf16[D], bf16[B, S, D])"
    )
    products = 4
    others = 15

    def streams(self, op: Operation) -> int:
        return len(op.operands) - 3

    def rule(self, op: Operation) -> Rule:
        right = _ROWS + ",bsd" * (len(op.operands) - 4)
        return make_rule(f"bsd,{right}->{right}", whole="d")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [v.tensor.dtype for v in op.operands[1:]]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x, norm, query, *earlier = args
        values, root, hat, weights = _attended(x, norm, query, *earlier)
        dweights = np.einsum("bsd,bsnd->bsn", dy, values)
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
        dhat = dscores[..., None] * (norm * query)
        inner = (dhat * hat).mean(-1, keepdims=True)
        dvalues = weights[..., None] * dy[:, :, None] + root * (dhat - hat * inner)
        of_keys = np.einsum("bsn,bsnd->d", dscores, hat)
        first, *rest = np.moveaxis(dvalues, 2, 0)
        return [first, of_keys * query, of_keys * norm, *rest]


def _attended(
    x: Array, norm: Array, query: Array, *earlier: Array
) -> tuple[Array, Array, Array, Array]:
    """The streams [B, S, N, D], one over the roots of their mean squares, the streams times these,
    and the weights [B, S, N]."""
    values = np.stack([x, *earlier], axis=2)
    root = 1 / np.sqrt((values * values).mean(-1, keepdims=True))
    hat = values * root
    scores = np.einsum("bsnd,d->bsn", hat, norm * query)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return values, root, hat, e / e.sum(-1, keepdims=True)
