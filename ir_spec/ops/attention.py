"""Attention as one fused kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule
from stagec.ir.serving import ServingStep
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.attention_core import (
    ORDERS,
    SCORES,
    VALUES,
    WHOLE,
    all_pairs,
    backward,
    core_flops,
    core_kernel,
    core_misfits,
    core_rule,
    forward,
    further,
    given,
    key_rows,
    local_pairs,
    scores_of,
    seen_keys,
    unread_bytes,
)
from stagec.ir_spec.ops.attention_parts import merge_parts
from stagec.ir_spec.ops.base import gradients, need_result
from stagec.ir_spec.ops.latent import rows_of_latent
from stagec.ir_spec.ops.ring import ring_backward, ring_forward
from stagec.support.diagnostics import error

_PARAMS = (
    *SCORES,
    *WHOLE,
    Param("ring", "name", "keys and values go round the ranks, in this order", choices=ORDERS),
)


def _rule(op: Operation, text: str, before: int) -> Rule:
    """In a ring keys and values are split as the queries are."""
    factor = "s" if "ring" in op.attrs else "t"
    return core_rule(op, text, before, factor, special=factor)


def _computed(op: Operation, q: int, n: Sizes) -> Expr:
    """The pairs that kernels compute, masks ignored; `q` is the operand with the queries. Where
    these are split over n ranks, and keys are not, a causal mask hides from rank i all parts of the
    keys but the first i + 1, and kernels leave them out: (n+1)/2 of n parts, in the mean over the
    ranks."""
    rows, columns = key_rows(op, q)
    n_ranks = axis_size(a for a in rows.axes if a not in columns.axes)
    if "past" in op.attrs:
        return n["s"] * (seen_keys(op, q) * n["t"] / columns.size)
    hides = op.flag("causal") and rows.size == columns.size
    return all_pairs(n) * (n_ranks + 1) / (n_ranks * 2) if hides else all_pairs(n)


def _kernel(op: Operation, kind: str, q: int, n: Sizes) -> KernelShape:
    """With all keys: where queries are split, and keys are not, a causal mask leaves half of them
    in the mean over the ranks."""
    keys, left = n.get("t", n["s"]), local_pairs(op, q, n)
    return core_kernel(op, kind, n, keys, op.flag("causal"), left)


class FlashAttention(OpDef):
    """softmax(q k^T / sqrt(K)) v as a FlashAttention kernel (arXiv 2205.14135), grouped queries
    included.

    Operands are q and a packed kv ([B, 2, S, G, K]), or q, k and v; the heads of v may have a size
    of their own, as in multi-head latent attention (arXiv 2405.04434). With `values` there are q
    and k alone: the first so many columns of the keys are the values too, and are read once, as in
    the absorbed form of latent attention (arXiv 2405.04434, section 2.1.2). Operands that flags
    name follow: `sinks`, `bias`, `selected`. Without a mask keys may be of another sequence than
    the queries: cross attention. With `documents` a sequence is packed of several, and a token sees
    its own. The second result, the row log-sum-exp in fp32, is there if backward needs it.

    FLOPs are those of the two products over the pairs that the mask leaves, exactly: S(S+1)/2 when
    causal, m(m+1)/2 + (S-m)W with m = min(S, W) in a window of W. The softmax inside the kernel is
    not counted, as in the FlashAttention papers. With `ring` all are split alike along the
    sequence, and a split becomes ring attention.
    """

    name = "stg.attention"
    operands = ("q", "k", "v*")
    results = ("result", "lse?")
    params = (*_PARAMS, VALUES)
    element_types = ("q", "f32")
    example = "%a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        return _rule(op, "bs(gr)k,{kv}{more}->bs(gr){v},b(gr)s", 1)

    def verify(self, op: Operation) -> Iterator[str]:
        yield from core_misfits(op, 1)

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return key_rows(op, 0)[1].size if _is_selection(op, operand) else None

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return core_flops(n, local_pairs(op, 0, n), 1, 1)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return core_flops(n, _computed(op, 0, n), 1, 1)

    def bytes_touched(self, op: Operation) -> Expr:
        return super().bytes_touched(op) - unread_bytes(op)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, "attention", 0, n)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if "values" in op.attrs:
            return super().grad(b, op, grads)
        if grads[0] is None:
            return [None] * len(op.operands)
        return gradients(b, op, [grads[0], op.results[0], need_result(op, 1, "lse"), *op.operands])

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keys and values of the tokens before are cached, of a window or of blocks as many as the
        queries may see. Those of another sequence, such as an encoder's, are cached once; of those
        that follow from a latent it is the latent."""
        q, keys = key_rows(op, 0)
        count = len(op.operands) - 1 - len(further(op))
        if step.is_tokens(q.size) and not step.is_tokens(keys.size):
            for index in range(1, 1 + count):
                op.set_operand(index, step.once(op.operands[index]))
            return op.results
        if not step.is_tokens(q.size) or not step.is_tokens(keys.size):
            return None
        if not op.flag("causal"):
            raise error(
                "attention without a causal mask sees tokens that are not there yet",
                op.loc,
                remedy="serve a causal model",
            )
        span = next((op.expr(n) for n in ("window", "chunk") if n in op.attrs), None)
        rows = rows_of_latent(step, op.operands[1 : 1 + count]) or [
            step.append(v, dim=2 if count == 1 else 1, span=span)
            for v in op.operands[1 : 1 + count]
        ]
        for index, value in enumerate(rows, start=1):
            op.set_operand(index, value)
        op.attrs |= step.past_attr()
        return op.results

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        if "s" in special:
            return ring_forward(b, op, special["s"])
        if "past" in op.attrs:
            return merge_parts(b, op, special["t"])
        return super().partition(b, op, special)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = given(op, args, ctx)
        return forward(x, scores_of(op, ctx, ctx, 0, x))


def _is_selection(op: Operation, operand: int) -> bool:
    return op.flag("selected") and operand == len(op.operands) - 1


class AttentionGrad(OpDef):
    """Gradient of `stg.attention`: five products over the same pairs, as the kernel recomputes the
    scores. The results are the gradients of q, of keys and values, of sinks and of the bias."""

    name = "stg.attention_grad"
    operands = ("dy", "y", "lse", "q", "k", "v*")
    results = ("dq", "dk", "dv?", "dsinks?", "dbias?")
    params = _PARAMS
    example = (
        "%dq, %dk, %dv = stg.attention_grad[causal](%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, S, H, K], bf16[B, S, G, K], bf16[B, S, G, K])"
    )

    def rule(self, op: Operation) -> Rule:
        text = "bs(gr){v},bs(gr){v},b(gr)s,bs(gr)k,{kv}{more}->bs(gr)k,{kv}{grads}"
        return _rule(op, text, 4)

    def verify(self, op: Operation) -> Iterator[str]:
        yield from core_misfits(op, 4)

    def dtypes(self, op: Operation) -> Sequence[str]:
        """Those of the operands that they are gradients of; of packed or plain keys that of dy."""
        count = len(self.rule_results(op))
        plain = count - sum(name != "selected" for name in further(op))
        own = [v.tensor.dtype for v in op.operands[3 + plain : 3 + count]]
        return [op.operands[0].tensor.dtype] * plain + own

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return key_rows(op, 3)[1].size if _is_selection(op, operand) else None

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return core_flops(n, local_pairs(op, 3, n), 3, 2)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return core_flops(n, _computed(op, 3, n), 3, 2)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, "attention_backward", 3, n)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        return (
            ring_backward(b, op, special["s"])
            if "s" in special
            else super().partition(b, op, special)
        )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y, lse, *rest = args
        x = given(op, rest, ctx)
        return backward(x, scores_of(op, ctx, ctx, 3, x), dy, y, lse)
