"""Softmax over the last dimension, and its gradient."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, evaluate
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Fusible, Wide
from stagec.ir_spec.ops.base import gradients
from stagec.ir_spec.ops.cache_rows import AHEAD, PAST, first_key, past_of
from stagec.ir_spec.ops.masks import ALIBI, alibi, seen, spans
from stagec.ir_spec.ops.rows import Axes, RowOp, all_reduced, row_dot

_CAUSAL = Param("causal", "flag", "mask the columns after the position of the row")
_WINDOW = Param("window", "size", "a row sees so many columns, up to its own position")
_RSQRT = Param("rsqrt", "size", "scale by 1/sqrt of this")


class Softmax(RowOp):
    """softmax(x / sqrt(rsqrt)) over the last dimension, 5 FLOPs per element; 3 if the maximum of
    each row and the sum of its exponentials are operands.

    `causal` masks the columns after the position of the row (the dimension before the last), as the
    fused scale-mask-softmax kernels do; `window` masks the columns further away than it. Masked
    elements are computed and stored. With a mask the last dimension is never split: it is the
    sequence, and splitting that is context parallelism. `alibi` adds a bias by distance to the
    scores; the dimension before the rows are heads.
    """

    name = "stg.softmax"
    traits = (Fusible(rows=True), Wide())
    operands = ("x", "statistics*")
    params = (_CAUSAL, _WINDOW, _RSQRT, ALIBI, PAST, AHEAD)
    sums = 2
    costs = (5, 3)
    example = "%p = stg.softmax[causal, rsqrt = K](%scores) : bf16[B, H, S, S]"

    def rule(self, op: Operation) -> Rule:
        rule = super().rule(op)
        return replace(rule, whole=rule.special, special=frozenset()) if _is_masked(op) else rule

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if _is_masked(op) and self.given(op):
            yield "takes no statistics if it is masked: it computes them itself"
        if op.flag("alibi") and (not _is_masked(op) or op.operands[0].tensor.rank < 3):
            yield "has a bias by distance, but no mask or no heads: expected [..., H, S, T]"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        if not _is_masked(op):
            return super().serve(step, op)
        op.attrs |= step.past_attr()
        return op.results

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        (x,) = op.operands
        row = letters(x.tensor.rank)
        spec = f"{row}->{row[:-1]}"
        mine = b.value("stg.max", [x], {"spec": spec, "to": "f32"}, hint=f"{x.name}_top")
        (top,) = all_reduced(b, [mine], over, "max")
        part = b.value("stg.sum_exp", [x, top], op.attrs, hint=f"{x.name}_exp")
        return [top, *all_reduced(b, [part], over)]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        self.plain(op)
        return gradients(b, op, [*grads, op.result])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, *given = args
        if given:
            top, total = (v[..., None] for v in given)
            return [np.exp((x - top) * rsqrt_scale(op, ctx)) / total]
        return [softmax(*_scores(op, ctx, x))]


class SinkSoftmax(OpDef):
    """softmax(x / sqrt(rsqrt)) over the last dimension with one more logit for each head, whose
    probability is dropped (gpt-oss); 5 FLOPs per element. Masks are those of `stg.softmax`."""

    name = "stg.sink_softmax"
    traits = (Fusible(rows=True),)
    operands = ("x", "sinks")
    params = (_CAUSAL, _WINDOW, _RSQRT)
    index = IndexRule("...hst,h->...hst", whole="t")
    flops_per_point = 5
    example = "%p = stg.sink_softmax[causal, rsqrt = K](%scores, %sinks) : bf16[B, H, S, S]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, op.result])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        scores, visible = _scores(op, ctx, args[0])
        if visible is not None:
            scores = np.where(visible, scores, -np.inf)
        sinks = np.broadcast_to(args[1][:, None, None], (*scores.shape[:-1], 1))
        return [softmax(np.concatenate([scores, sinks], -1), None)[..., :-1]]


class SinkSoftmaxGrad(OpDef):
    """Gradients of `stg.sink_softmax` from its result, 7 FLOPs per element."""

    name = "stg.sink_softmax_grad"
    traits = (Fusible(rows=True),)
    operands = ("dy", "y")
    results = ("dx", "dsinks")
    params = (_RSQRT,)
    index = IndexRule("...hst,...hst->...hst,h", whole="t")
    flops_per_point = 7
    example = "%dx, %ds = stg.sink_softmax_grad[rsqrt = K](%dp, %p) : (bf16[B, H, S, S], bf16[H])"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y = args
        total = (dy * y).sum(-1)
        lost = (1 - y.sum(-1)) * total
        axes = tuple(k for k in range(lost.ndim) if k != lost.ndim - 2)
        return [y * (dy - total[..., None]) * rsqrt_scale(op, ctx), -lost.sum(axes)]


def _scores(op: Operation, ctx: NumericContext, x: Array) -> tuple[Array, Array | None]:
    """The scaled scores with their bias, and the mask of those that are visible; None: all are."""
    x = x * rsqrt_scale(op, ctx)
    if not _is_masked(op):
        return x, None
    rows, columns = op.operands[0].tensor.dims[-2:]
    past = ctx.size(past_of(op))
    first = ctx.size(first_key(op, rows.size, columns.size))
    at, of = (ctx.positions(d) for d in (rows, columns))
    before, after = [p + past for p in at], [p + first for p in of]
    if op.flag("alibi"):
        x = x + alibi(ctx, op.operands[0].tensor.dims[-3], before, after)
    return x, seen(op, before, after, spans(op, ctx))


def _is_masked(op: Operation) -> bool:
    return op.flag("causal") or "window" in op.attrs


class SoftmaxGrad(RowOp):
    """Gradient of `stg.softmax` from its result, 5 FLOPs per element; 3 if the sums of dy*y over
    the rows are an operand."""

    name = "stg.softmax_grad"
    operands = ("dy", "y", "sums*")
    params = (_RSQRT,)
    signature = ("xx", "x")
    costs = (5, 3)
    example = "%dx = stg.softmax_grad[rsqrt = K](%dp, %p) : bf16[B, H, S, S]"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, y = op.operands
        return all_reduced(b, [row_dot(b, dy, y, f"{dy.name}_sum")], over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y, *given = args
        total = given[0] if given else (dy * y).sum(-1)
        return [y * (dy - total[..., None]) * rsqrt_scale(op, ctx)]


def rsqrt_scale(op: Operation, ctx: NumericContext) -> float:
    """1/sqrt of the parameter `rsqrt`; 1 without it."""
    value = op.attrs.get("rsqrt")
    return float(evaluate(value, ctx.env)) ** -0.5 if isinstance(value, Expr) else 1.0


def softmax(x: Array, visible: Array | None) -> Array:
    """Softmax over the last axis, of the elements that are `visible` (None: all of them)."""
    if visible is not None:
        x = np.where(visible, x, -np.inf)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
