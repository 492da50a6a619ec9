"""The last step of a ring under a window: only the keys that the window reaches are sent.

Each of n ranks has s queries, in plain order, and a window of W keys reaches
h = min(n-1, ceil((W-1)/s)) ranks back. The keys of the first h-1 of these ranks go round as in any
ring. Of the last rank only the last `min(s, W-1 - (h-1)s)` keys are visible, so only these are
sent, and in backward only their gradients come back. Queries have the shape [B, n, s, ...] with one
part for each rank (`stg.reshape`), keys and values the shape [B, n, rows, ...].
"""

from collections.abc import Sequence

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, ZERO, Expr, call, expand
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.traits import InPlace
from stagec.ir.types import axis_index, axis_size
from stagec.ir_spec.ops.attention_base import AttentionWork
from stagec.ir_spec.ops.attention_core import (
    SCORES,
    Given,
    Scores,
    all_pairs,
    backward,
    forward,
    scores_between,
)
from stagec.ir_spec.ops.masks import pairs
from stagec.ir_spec.ops.ring_work import hops

_KEYS = "bztgk,bztgv"


class _Edge(AttentionWork):
    """Base of the step forward and the step backward."""

    params = (
        *(p for p in SCORES if p.name != "sinks"),
        Param("over", "axes", "the axes of the ring", required=True),
        Param("after", "size", "the earlier steps, which send whole blocks", required=True),
    )

    def left(self, op: Operation, n: Sizes) -> Expr:
        """The pairs that the window leaves between a block of queries and the block of keys that
        lies `after + 1` blocks before it: a second difference of the pairs of whole sequences."""
        s, w = n["s"], op.expr("after")
        two_more, one_more, same = (pairs(op, s * (w + k), s * (w + k)) for k in (2, 1, 0))
        return expand(two_more - one_more * 2 + same)

    def computed(self, op: Operation, n: Sizes) -> Expr:
        return all_pairs(n)

    def active(self, op: Operation) -> Expr | None:
        """1 for ranks with more than `after` ranks before them, else 0."""
        dims, over = op.operands[self.queries].tensor.dims, op.names("over")
        steps = hops(op, dims[1].size * dims[2].size, axis_size(over), "plain")
        further = call("max", [axis_index(over) - op.expr("after"), ZERO])
        return call("min", [ONE, steps, further])

    def scores(
        self, op: Operation, ctx: NumericContext, q: Array, k: Array, v: Array
    ) -> tuple[Given, Scores]:
        """The local q, k and v without the dimension of parts, and their scores."""
        dims = op.operands[self.queries].tensor.dims
        (part,) = ctx.positions(dims[1])
        s, rows = q.shape[2], k.shape[2]
        back = part - ctx.size(op.expr("after")) - 1
        first = (back % ctx.size(dims[1].size)) * s + s - rows
        of = list(range(first, first + rows))
        x = Given(q[:, 0], k[:, 0], v[:, 0], False)
        return x, scores_between(op, ctx, list(range(part * s, part * s + s)), of, dims[3], x)


class AttentionEdge(_Edge):
    """The last step of ring attention under a window, with only the last keys of the furthest block
    that the window reaches, and its log-sum-exp. FLOPs are exactly those of the pairs that the
    window leaves."""

    name = "stg.attention_edge"
    operands = ("q", "k", "v")
    results = ("result", "lse")
    element_types = ("q", "f32")
    index = IndexRule(f"bzs(gr)k,{_KEYS}->bzs(gr)v,b(gr)zs", whole="sktv")
    example = (
        "%y, %l = stg.attention_edge[causal, window = 64, over = cp, after = 0](%q, %k, %v) : "
        "(bf16[B, 4, S/4, H, K], f32[B, H, 4, S/4])"
    )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        y, lse = forward(*self.scores(op, ctx, *args))
        return [y[:, None], lse[:, :, None]]


class AttentionEdgeGrad(_Edge):
    """What the step `stg.attention_edge` adds to the gradients, from the final result and
    log-sum-exp."""

    name = "stg.attention_edge_grad"
    backward = True
    operands = ("dy", "y", "lse", "q", "k", "v")
    results = ("dq", "dk", "dv")
    index = IndexRule(f"bzs(gr)v,bzs(gr)v,b(gr)zs,bzs(gr)k,{_KEYS}->bzs(gr)k,{_KEYS}", whole="sktv")
    example = (
        "%dq, %dk, %dv = stg.attention_edge_grad[causal, window = 64, over = cp, after = 0]"
        "(%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, 4, S/4, H, K], bf16[B, 4, S/4, G, K], bf16[B, 4, S/4, G, K])"
    )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y, lse, *qkv = args
        x, scores = self.scores(op, ctx, *qkv)
        grads = backward(x, scores, dy[:, 0], y[:, 0], lse[:, :, 0])
        return [v[:, None] for v in grads]


class AddEdge(OpDef):
    """Adds rows to the last rows of each part of a sequence, in place; 1 FLOP per element added."""

    name = "stg.add_edge"
    operands = ("total", "edge")
    traits = (InPlace(operands=(0,)),)
    index = IndexRule("bzsgk,bzhgk->bzsgk", whole="sh")
    example = "%t = stg.add_edge(%k, %v) : bf16[B, 4, S/4, G, K]"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return n["b"] * n["z"] * n["h"] * n["g"] * n["k"]

    def bytes_touched(self, op: Operation) -> Expr:
        return op.operands[1].tensor.local_bytes * 3

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        total, edge = args
        out = total.copy()
        out[:, :, total.shape[2] - edge.shape[2] :] += edge
        return [out]


class ZerosLike(OpDef):
    """Zeros in fp32 in the shape of x, such as the start of a sum; no FLOPs."""

    name = "stg.zeros_like"
    operands = ("x",)
    index = IndexRule("...->...")
    element_types = ("f32",)
    example = "%z = stg.zeros_like(%x) : f32[B, S, D]"

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.zeros_like(args[0])]
