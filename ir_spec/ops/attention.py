"""Attention as one fused kernel, copies of heads of keys and values that several heads of queries
share, and attention to keys that are split over ranks, such as caches that are split along their
tokens.

Of split keys, every rank has all queries and attends to its own keys. The results are merged by
their log-sum-exp: with `%q` on n ranks of cp, and the keys split over them,

    %p, %l = stg.attention_parts[over = cp](%q, %k, %v)    of each rank one part, and its lse
    %g = stg.all_gather[dim = 3, over = cp](%l)            [B, H, S, n], a number for each row
    %w = stg.softmax(%g)                                   the share of each part
    %y = stg.sum_parts(%p, %w')                            w' is the rank's own; a partial sum
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, call
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Fusible, Recasts, Trait, View
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.attention_base import AttentionOp
from stagec.ir_spec.ops.attention_core import (
    ORDERS,
    SCORES,
    VALUES,
    WHOLE,
    all_pairs,
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
from stagec.ir_spec.ops.base import gradients, need_result
from stagec.ir_spec.ops.norm import WithVectors
from stagec.ir_spec.ops.ring import ring_backward, ring_forward
from stagec.ir_spec.ops.rope import RotaryEmbedding

_PARAMS = (
    *SCORES,
    *WHOLE,
    Param("ring", "name", "keys and values go round the ranks, in this order", choices=ORDERS),
    Param(
        "steps",
        "name",
        "how eager software runs a ring: keys and values are gathered in one buffer, or passed on",
        choices=("gathered", "passed"),
    ),
)


class _Flash(AttentionOp):
    """Base class of attention and its gradient."""

    def keys(self, op: Operation) -> str:
        """In a ring, keys and values are split like the queries."""
        return "s" if "ring" in op.attrs else "t"

    def rule(self, op: Operation) -> Rule:
        return replace(super().rule(op), special=frozenset(self.keys(op)))

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        selection = op.flag("selected") and operand == len(op.operands) - 1
        return key_rows(op, self.queries)[1].size if selection else None

    def left(self, op: Operation, n: Sizes) -> Expr:
        return local_pairs(op, self.queries, n)

    def computed(self, op: Operation, n: Sizes) -> Expr:
        """If queries are split over n ranks, and keys are not, a causal mask leaves rank i only the
        first i + 1 parts of the keys, and kernels skip the others: on average over the ranks, they
        compute (n+1)/2 of n parts."""
        rows, columns = key_rows(op, self.queries)
        n_ranks = axis_size(a for a in rows.axes if a not in columns.axes)
        if "past" in op.attrs:
            return n["s"] * (seen_keys(op, self.queries) * n["t"] / columns.size)
        hides = op.flag("causal") and rows.size == columns.size
        return all_pairs(n) * (n_ranks + 1) / (n_ranks * 2) if hides else all_pairs(n)

    def met(self, op: Operation, n: Sizes) -> tuple[Expr, bool]:
        """All keys: if queries are split, and keys are not, a causal mask leaves half of them on
        average over the ranks."""
        return n.get("t", n["s"]), op.flag("causal")


#: Parameters of attention for which some frameworks have no kernel.
NO_KERNEL = ("alibi", "sinks", "softcap")


def _expanded(b: Builder, op: Operation, is_one: IsOneOnRank) -> None:
    """The pass `expand-attention` writes this form instead."""


class FlashAttention(_Flash):
    """softmax(q k^T / sqrt(K)) v as a FlashAttention kernel (arXiv 2205.14135), including grouped
    queries.

    Operands are q and a packed kv ([B, 2, S, G, K]), or q, k and v; the heads of v may have a
    different size, as in multi-head latent attention (arXiv 2405.04434). With `values`, the
    operands are only q and k: the first `values` columns of the keys are the values too, and are
    read once, as in the absorbed form of latent attention (arXiv 2405.04434, section 2.1.2). The
    operands that flags name follow: `sinks`, `bias`, `selected`. Without a mask, keys may belong to
    another sequence than the queries: cross attention. With `documents`, several sequences are
    packed into one, and a token sees only its own. The second result, the row log-sum-exp in fp32,
    exists if backward needs it.

    FLOPs are those of the two products over exactly the pairs that the mask leaves: S(S+1)/2 for a
    causal mask, m(m+1)/2 + (S-m)W with m = min(S, W) in a window of W. The softmax inside the
    kernel is not counted, as in the FlashAttention papers. With `ring`, all operands are split
    equally along the sequence, and a split becomes ring attention.
    """

    name = "stg.attention"
    operands = ("q", "k", "v*")
    results = ("result", "lse?")
    params = (*_PARAMS, VALUES)
    element_types = ("q", "f32")
    example = "%a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, K]"

    def bytes_touched(self, op: Operation) -> Expr:
        return super().bytes_touched(op) - unread_bytes(op)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if "values" in op.attrs:
            return super().grad(b, op, grads)
        if grads[0] is None:
            return [None] * len(op.operands)
        return gradients(b, op, [grads[0], op.results[0], need_result(op, 1, "lse"), *op.operands])

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {
            "normed_keys": self._copied_heads,
            "attention": self._repeated_heads,
            **dict.fromkeys(NO_KERNEL, _expanded),
            "joined_queries": self._by_head,
        }

    def _by_head(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """If a head of queries is concatenated of parts (`torch.cat`), or copied, its tokens are
        consecutive in memory. The kernel's result has the same layout (`empty_like` in `mha_fwd`,
        flash_api.cpp), and is copied for the following product (`transpose(1, 2).contiguous()` of
        transformers)."""
        if not (op.flag("by_head") or _is_concatenated(op.operands[0])):
            return None
        first, *others = self._with_operands(b, op, op.operands)
        return [b.value("stg.reorder", [first], hint=f"{first.name}_o"), *others]

    def _repeated_heads(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """Keys and values that several heads share are copied for each head, as with `repeat_kv` of
        torchtitan; the kernel then has a head of keys for each head of queries, and so have its
        gradients. On a rank with a single head of keys, `expand` and `reshape` copy nothing, and
        where each head has its own, keys and values stay as they are (`n_rep == 1`)."""
        if "values" in op.attrs or "past" in op.attrs or len(op.operands) < 3:
            return None
        q, *shared = op.operands[:3]
        heads, groups = q.tensor.dims[-2].size, shared[0].tensor.dims[-2].size
        if is_one(heads - groups + 1, whole=True):
            return None
        kind = "stg.expand_heads" if is_one(groups) else "stg.repeat_heads"
        rows = [b.value(kind, [v], {"heads": heads}, hint=v.name) for v in shared]
        return self._with_operands(b, op, [q, *rows, *op.operands[3:]])

    def _copied_heads(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """If heads are normalized, keys are DTensors, whose `reshape` copies because it goes by the
        heads of all ranks (torchtitan/models/qwen3/infra/parallelize.py: `use_local_output =
        False`)."""
        if len(op.operands) < 2 or not _has_norm(op.operands[1]):
            return None
        return self._repeated_heads(b, op, partial(is_one, whole=True))

    def _with_operands(
        self, b: Builder, op: Operation, operands: Sequence[Value]
    ) -> Sequence[Value]:
        """The results of the same attention of other operands."""
        types, names = [r.tensor for r in op.results], [r.name for r in op.results]
        return b.op(self.name, operands, op.attrs, types=types, names=names).results

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keys and values of earlier tokens are cached; with a window or blocks, only as many as
        the queries can see. Those of another sequence, such as an encoder's, are cached once; if
        they are computed from a latent, the latent is cached."""
        q, keys = key_rows(op, 0)
        count = len(op.operands) - 1 - len(further(op))
        if step.is_tokens(q.size) and not step.is_tokens(keys.size):
            for index in range(1, 1 + count):
                op.set_operand(index, step.once(op.operands[index]))
            return op.results
        if not step.is_tokens(q.size) or not step.is_tokens(keys.size):
            return None
        if not op.flag("causal"):
            raise op.error(
                "attention without a causal mask reads later tokens, which do not exist yet",
                remedy="serve a causal model",
            )
        span = next((op.expr(n) for n in ("window", "chunk") if n in op.attrs), None)
        new, dim = op.operands[1 : 1 + count], 2 if count == 1 else 1
        rows = step.rows_of_latent(new) or [step.append(v, dim=dim, span=span) for v in new]
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


def _has_norm(keys: Value) -> bool:
    """Whether each head of the keys is normalized, before they are rotated and cast."""
    op = keys.producer
    while op is not None and (op.has(Recasts) or isinstance(op.definition, RotaryEmbedding)):
        op = op.operands[0].producer
    return op is not None and isinstance(op.definition, WithVectors)


def _is_concatenated(queries: Value) -> bool:
    """Whether model code concatenates rotated parts of heads with others."""
    made = queries.producer
    while made is not None and made.has(Recasts):
        made = made.operands[0].producer
    if made is None or not isinstance(made.definition, RotaryEmbedding):
        return False
    return "first" in made.attrs and not made.flag("by_token")


class AttentionGrad(_Flash):
    """Gradient of `stg.attention`: five products over the same pairs, since the kernel recomputes
    the scores. The results are the gradients of q, of keys and values, of sinks and of the bias."""

    name = "stg.attention_grad"
    backward = True
    operands = ("dy", "y", "lse", "q", "k", "v*")
    results = ("dq", "dk", "dv?", "dsinks?", "dbias?")
    params = _PARAMS
    example = (
        "%dq, %dk, %dv = stg.attention_grad[causal](%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, S, H, K], bf16[B, S, G, K], bf16[B, S, G, K])"
    )

    def dtypes(self, op: Operation) -> Sequence[str]:
        """The element types of the operands that the results are gradients of."""
        return [v.tensor.dtype for v in op.operands[3:]]

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        if "s" in special:
            return ring_backward(b, op, special["s"])
        return super().partition(b, op, special)


class RepeatHeads(OpDef):
    """Repeats each head, as `torch.repeat_interleave` along the heads: [B, S, G, K] becomes [B, S,
    H, K]. No FLOPs."""

    name = "stg.repeat_heads"
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(),)
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


class ExpandHeads(RepeatHeads):
    """A view of the only head of a rank as several, as `torch.Tensor.expand`: [B, S, G, K] becomes
    [B, S, H, K]."""

    name = "stg.expand_heads"
    traits = (View(),)
    example = "%y = stg.expand_heads[heads = H](%k) : bf16[B, S, H, K]"


class SumHeads(OpDef):
    """Gradient of `stg.repeat_heads` and `stg.expand_heads`: the sum over the copies of each
    head."""

    name = "stg.sum_heads"
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


class AttentionParts(AttentionOp):
    """Attention to the keys of each rank of `over`: results in fp32 [n, B, S, H, V], and the row
    log-sum-exps [B, H, S, n]; 0 and -inf for rows without visible keys on a rank.

    A logit of `sinks` counts only in the first part. FLOPs are those of the pairs that the mask
    leaves, on average over the ranks, rounded up.
    """

    name = "stg.attention_parts"
    operands = ("q", "k", "v*")
    results = ("result", "lse")
    params = (
        *SCORES,
        *WHOLE,
        VALUES,
        Param("over", "axes", "the axes that split the keys", required=True),
    )
    element_types = ("f32", "f32")
    example = (
        "%p, %l = stg.attention_parts[causal, over = cp](%q, %k, %v) : "
        "(f32[cp, B, S, H, K], f32[B, H, S, cp])"
    )

    def rule(self, op: Operation) -> Rule:
        text = "bs(gr)k,{kv}{more}->pbs(gr){v},b(gr)sp"
        return core_rule(op, text, 1, "(pt)", sizes={"p": axis_size(op.names("over"))})

    def left(self, op: Operation, n: Sizes) -> Expr:
        rows, keys = key_rows(op, 0)
        return local_pairs(op, 0, {"s": rows.local, "t": keys.local})

    def computed(self, op: Operation, n: Sizes) -> Expr:
        return n["s"] * call("ceildiv", [seen_keys(op, 0), axis_size(op.names("over"))])

    def met(self, op: Operation, n: Sizes) -> tuple[Expr, bool]:
        return key_rows(op, 0)[1].local, False

    def bytes_touched(self, op: Operation) -> Expr:
        return super().bytes_touched(op) - unread_bytes(op)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = given(op, args, ctx)
        scores = scores_of(op, ctx, ctx, 0, x)
        if "sinks" in x.more and any(ctx.coords.get(a, 0) for a in op.names("over")):
            x.more = {name: v for name, v in x.more.items() if name != "sinks"}
        out, lse = forward(x, scores)
        return [out[None], lse[..., None]]


class SumParts(OpDef):
    """The sum of parts [n, ...] weighted by their shares [B, H, S, n], 2 FLOPs per element of a
    part; if each rank has a part, the result is a partial sum."""

    name = "stg.sum_parts"
    operands = ("parts", "shares")
    index = IndexRule("pbshv,bhsp->bshv")
    flops_per_point = 2
    example = "%y = stg.sum_parts(%p, %w) : f32[B, S, H, K]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        parts, shares = args
        return [(parts * shares.transpose(3, 0, 2, 1)[..., None]).sum(0)]


def merge_parts(b: Builder, op: Operation, over: Sequence[str]) -> list[Value]:
    """Rewrite `stg.attention` to keys that are split over these axes."""
    name, axes = op.results[0].name, tuple(over)
    attrs = {k: v for k, v in op.attrs.items() if k != "phase"} | {"over": axes}
    names = [f"{name}_parts", f"{name}_lse"]
    parts, lse = b.op("stg.attention_parts", op.operands, attrs, names=names).results
    along: dict[str, RawAttr] = {"dim": (3,), "over": axes}
    whole = b.value("stg.all_gather", [lse], along, hint=f"{name}_lses")
    shares = b.value("stg.softmax", [whole], hint=f"{name}_shares")
    own = b.value("stg.all_slice", [shares], along, hint=f"{name}_share")
    total = b.value("stg.sum_parts", [parts, own], hint=f"{name}_sum")
    dtype = op.results[0].tensor.dtype
    if dtype == "f32":
        return [total]
    return [b.value("stg.cast", [total], {"to": dtype}, hint=f"{name}_{dtype}")]
