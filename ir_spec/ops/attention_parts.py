"""Attention to keys that are split over ranks, such as caches that are split along their tokens.

Every rank has all queries and attends to its own keys. The results are merged by their log-sum-exp:
with `%q` on n ranks of cp, and the keys split over them,

    %p, %l = stg.attention_parts[over = cp](%q, %k, %v)    of each rank one part, and its lse
    %g = stg.all_gather[dim = 3, over = cp](%l)            [B, H, S, n], a number for each row
    %w = stg.softmax(%g)                                   the share of each part
    %y = stg.sum_parts(%p, %w')                            w' is the rank's own; a partial sum
"""

from collections.abc import Sequence

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, call
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.attention_base import AttentionOp
from stagec.ir_spec.ops.attention_core import (
    SCORES,
    VALUES,
    WHOLE,
    core_rule,
    forward,
    given,
    key_rows,
    local_pairs,
    scores_of,
    seen_keys,
    unread_bytes,
)


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
