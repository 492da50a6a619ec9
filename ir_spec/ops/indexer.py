"""The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): scores
by which each query selects its keys. `stg.topk` selects, `stg.attention[selected]` sees them only.
"""

from collections.abc import Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Expr, call, same
from stagec.ir.kernel import INDEXER, KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.rule import Rule, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir_spec.ops.base import gradients
from stagec.ir_spec.ops.cache_rows import PAST, past_of
from stagec.ir_spec.ops.masks import CAUSAL, RATE, complete_rows, pairs, pairs_of_rows


def _seen(op: Operation, q: int, n: Sizes) -> Expr:
    """The number of pairs that the mask leaves on a rank, rounded up; `q` is the index of the
    queries, which keys follow."""
    rows, columns = op.operands[q].tensor.dims[1], op.operands[q + 1].tensor.dims[1]
    of_rows = "rate" in op.attrs
    if op.flag("causal") and not of_rows and same(rows.size, columns.size):
        return n["s"] * (rows.size + 1) / 2
    whole = pairs_of_rows(op, rows.size) if of_rows else pairs(op, rows.size, columns.size)
    ranks = rows.size / n["s"]
    if "past" in op.attrs:
        ranks = ranks * columns.size / n["t"]
    return whole if ranks == 1 else call("ceildiv", [whole, ranks])


def _each(n: Sizes, products: int, sums: int) -> Expr:
    """FLOPs of a pair: products of all heads, and sums over them."""
    return n["b"] * n["h"] * (n["k"] * products + sums) * 2


def _kernel(op: Operation, n: Sizes, kind: str, q: int, mark: str = "") -> KernelShape:
    """The kernel as attention with one key for all heads and values of one element, which represent
    the sum over heads. Behind cached keys, keys are the mean number per query, rounded up."""
    mean = "past" in op.attrs or "rate" in op.attrs
    keys = call("ceildiv", [_seen(op, q, n), n["s"]]) if mean else n["t"]
    extents = (n["b"], n["h"], ONE, n["s"], keys, n["k"], ONE)
    masked = op.flag("causal") and not mean
    return KernelShape(kind, op.operands[q].tensor.dtype, extents, masked, mark=mark)


class IndexScores(OpDef):
    """The sum over heads h of w[h] relu(q[h] . k), with one key for all heads; -inf where a causal
    mask hides the key. 2 H K + 2 H FLOPs per pair of query and key that the mask leaves, without
    weights 2 H K. Serving caches the keys. With `rate`, each key is a row of `rate` tokens
    (`stg.compress`), and sums over heads do not count as matrix products."""

    name = "stg.index_scores"
    operands = ("q", "k", "w?")
    params = (CAUSAL, RATE, PAST)
    element_types = ("f32",)
    example = "%scores = stg.index_scores[causal](%q, %k, %weights) : f32[B, S, S]"

    def rule(self, op: Operation) -> Rule:
        weights = ",bsh" if len(op.operands) > 2 else ""
        whole = "k" if "past" in op.attrs else "kt"
        return make_rule(f"bshk,btk{weights}->bst", whole=whole)

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        if "rate" in op.attrs and step.is_tokens(op.operands[0].tensor.shape[1]):
            op.set_operand(1, step.append(op.operands[1], rate=op.expr("rate")))
            op.attrs |= step.past_attr()
            return op.results
        if op.flag("causal") and all(step.is_tokens(v.tensor.shape[1]) for v in op.operands):
            op.set_operand(1, step.append(op.operands[1]))
            op.attrs |= step.past_attr()
            return op.results
        return super().serve(step, op)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _each(n, 1, len(op.operands) - 2) * _seen(op, 0, n)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        sums = 0 if "rate" in op.attrs else len(op.operands) - 2
        return _each(n, 1, sums) * n["s"] * n["t"]

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, n, "attention", 0, INDEXER)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, *op.operands])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        q, k, *w = args
        dots = np.maximum(_dots(q, k), 0)
        scores = np.einsum("bsht,bsh->bst", dots, w[0]) if w else dots.sum(2)
        return [np.where(_visible(op, ctx, 0), scores, -np.inf)]


class IndexScoresGrad(OpDef):
    """Gradient of `stg.index_scores`: three products, since the kernel recomputes the first, and
    two sums over heads or keys where there are weights."""

    name = "stg.index_scores_grad"
    operands = ("dy", "q", "k", "w?")
    results = ("dq", "dk", "dw?")
    element_types = ("q", "k", "w")
    params = (CAUSAL, RATE)
    example = (
        "%dq, %dk, %dw = stg.index_scores_grad[causal](%ds, %q, %k, %w) : "
        "(bf16[B, S, H, K], bf16[B, S, K], bf16[B, S, H])"
    )

    def rule(self, op: Operation) -> Rule:
        weights = ",bsh" if len(op.operands) > 3 else ""
        return make_rule(f"bst,bshk,btk{weights}->bshk,btk{weights}", whole="kt")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _each(n, 3, 2 * (len(op.operands) - 3)) * _seen(op, 1, n)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        sums = 0 if "rate" in op.attrs else 2 * (len(op.operands) - 3)
        return _each(n, 3, sums) * n["s"] * n["t"]

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, n, "attention_backward", 1)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, q, k, *w = args
        dy = np.where(_visible(op, ctx, 1), dy, 0)[:, :, None]
        dots = _dots(q, k)
        d = dy * (w[0][..., None] if w else 1) * (dots > 0)
        dw = [(dy * np.maximum(dots, 0)).sum(-1)] * len(w)
        return [np.einsum("bsht,btk->bshk", d, k), np.einsum("bsht,bshk->btk", d, q), *dw]


def _dots(q: Array, k: Array) -> Array:
    return np.einsum("bshk,btk->bsht", q, k)


def _visible(op: Operation, ctx: NumericContext, q: int) -> Array:
    rows, columns = op.operands[q].tensor.dims[1], op.operands[q + 1].tensor.dims[1]
    at = np.asarray(ctx.positions(rows)) + ctx.size(past_of(op))
    of = np.asarray(ctx.positions(columns))
    if "rate" in op.attrs:
        return complete_rows(at, of, ctx.size(op.expr("rate")))
    return (at[:, None] >= of) | (not op.flag("causal"))
