"""Attention as one fused kernel, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, product
from stagec.ir.opdef import Array, NumericContext, OpDef, Param, Sizes
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.types import Dim
from stagec.ir_spec.ops.base import need_result
from stagec.ir_spec.ops.norm import softmax, visible

_CAUSAL = Param("causal", "flag", "mask the future")


def _core_flops(n: Sizes, keys: int, values: int) -> Expr:
    """2 FLOPs per multiply-add of products with the whole score matrix: `keys` of them with head
    size K, `values` with that of the values."""
    return product(n[f] for f in "bgrst") * (n["k"] * keys + n.get("v", n["k"]) * values) * 2


def _letters(*, packed: bool) -> tuple[str, str, str]:
    """The rule's text of queries, of keys and values, and of the result."""
    if packed:
        return "bs(gr)k", "bztgk", "bs(gr)k"
    return "bs(gr)k", "btgk,btgv", "bs(gr)v"


def _executed(op: Operation, flops: Expr) -> Expr:
    return flops / 2 if op.flag("causal") else flops


class Attention(OpDef):
    """softmax(q k^T / sqrt(K)) v as a FlashAttention kernel (arXiv 2205.14135), grouped queries
    included.

    Operands are q and a packed kv ([B, 2, S, G, K]), or q, k and v; the heads of v may have a size
    of their own, as in multi-head latent attention (arXiv 2405.04434). The second result, the row
    log-sum-exp in fp32, is there if backward needs it. FLOPs are those of the two products, half of
    them when causal; the softmax inside the kernel is not counted, as in the FlashAttention papers.
    """

    name = "stg.attention"
    operands = ("q", "k", "v")
    variadic = True
    results = ("result", "lse")
    required_results = 1
    params = (_CAUSAL,)
    example = "%a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        q, kv, y = _letters(packed=len(op.operands) == 2)
        return make_rule(f"{q},{kv}->{y},b(gr)s", whole="zkv", special="t")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "f32"]

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) not in (2, 3):
            yield "expects q and kv, or q, k and v"
        elif len(op.operands) == 2 and op.operands[1].tensor.shape[1] != 2:
            yield f"dimension 1 of kv holds keys and values, so it must be 2: {op.operands[1].type}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _executed(op, self.matmul_flops(op, n))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return _core_flops(n, 1, 1)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        dy = grads[0]
        if dy is None:
            return [None] * len(op.operands)
        attrs = {"causal": True} if op.flag("causal") else {}
        operands = [dy, op.results[0], need_result(op, 1, "lse"), *op.operands]
        names = [f"d_{v.name}" for v in op.operands]
        return b.op("stg.attention_grad", operands, attrs, names=names).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        q, k, v = _unpack(args)
        scores = _scores(q, k)
        start = ctx.start(op.operands[0].tensor.dims[1]) if op.flag("causal") else None
        out = np.einsum("bgrst,btgv->bsgrv", softmax(scores, start), v)
        out = out.reshape(*q.shape[:3], v.shape[-1])
        return [out, _lse(scores, start).reshape(q.shape[0], q.shape[2], q.shape[1])]


class AttentionGrad(OpDef):
    """Gradient of `stg.attention`: five products, as the kernel recomputes the scores; half when
    causal."""

    name = "stg.attention_grad"
    operands = ("dy", "y", "lse", "q", "k", "v")
    variadic = True
    results = ("dq", "dk", "dv")
    required_results = 2
    params = (_CAUSAL,)
    example = (
        "%dq, %dk, %dv = stg.attention_grad[causal](%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, S, H, K], bf16[B, S, G, K], bf16[B, S, G, K])"
    )

    def rule(self, op: Operation) -> Rule:
        q, kv, y = _letters(packed=len(op.operands) == 5)
        return make_rule(f"{y},{y},b(gr)s,{q},{kv}->{q},{kv}", whole="zkv", special="t")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _executed(op, self.matmul_flops(op, n))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return _core_flops(n, 3, 2)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, _, _, q = args[:4]
        _, k, v = _unpack(args[3:])
        start = ctx.start(op.operands[3].tensor.dims[1]) if op.flag("causal") else None
        p = softmax(_scores(q, k), start)
        b, s, h, d = q.shape
        g = k.shape[2]
        dyg = dy.reshape(b, s, g, h // g, v.shape[-1])
        dv = np.einsum("bgrst,bsgrv->btgv", p, dyg)
        dp = np.einsum("bsgrv,btgv->bgrst", dyg, v)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(d)
        dq = np.einsum("bgrst,btgk->bsgrk", ds, k).reshape(q.shape)
        dk = np.einsum("bgrst,bsgrk->btgk", ds, q.reshape(b, s, g, h // g, d))
        return [dq, np.stack([dk, dv], axis=1)] if len(args) == 5 else [dq, dk, dv]


def _unpack(args: Sequence[Array]) -> tuple[Array, Array, Array]:
    if len(args) == 2:
        return args[0], args[1][:, 0], args[1][:, 1]
    return args[0], args[1], args[2]


def _scores(q: Array, k: Array) -> Array:
    b, s, h, d = q.shape
    g = k.shape[2]
    return np.einsum("bsgrk,btgk->bgrst", q.reshape(b, s, g, h // g, d), k) / np.sqrt(d)


def _lse(scores: Array, start: int | None) -> Array:
    if start is not None:
        scores = np.where(visible(scores, start), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    return (np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top)[..., 0]


class Rope(OpDef):
    """Rotary position embedding (arXiv 2104.09864) of [B, S, heads, K] along dimension 1; 3 FLOPs
    per rotated element.

    With `last` only that many elements at the end of each head are rotated. `inverse` rotates back,
    which is its gradient.
    """

    name = "stg.rope"
    operands = ("x",)
    params = (
        Param("base", "size", "the base of the frequencies (default 10000)"),
        Param("last", "size", "how many elements are rotated (default all)"),
        Param("inverse", "flag", "rotate by the negative angle"),
    )
    example = "%q2 = stg.rope[base = 500000](%q) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        text = letters(op.operands[0].tensor.rank)
        return make_rule(f"{text}->{text}", whole=text[-1])

    def verify(self, op: Operation) -> Iterator[str]:
        if op.operands[0].tensor.rank < 3:
            yield f"expects [batch, position, ..., pairs], found {op.operands[0].type}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        whole, last = n[letters(len(n))[-1]], op.attrs.get("last")
        rotated = last if isinstance(last, Expr) else whole
        return product(n.values()) / whole * rotated * 3

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        attrs = {k: v for k, v in op.attrs.items() if k in ("base", "last")}
        if not op.flag("inverse"):
            attrs["inverse"] = True
        return [dy and b.value("stg.rope", [dy], attrs, hint=f"d_{op.operands[0].name}")]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        last = ctx.size(op.expr("last")) if "last" in op.attrs else args[0].shape[-1]
        still, x = args[0][..., :-last], args[0][..., -last:]
        half = last // 2
        angles = _angles(
            x.shape[1],
            half,
            ctx.start(_position(op)),
            ctx.size(op.expr("base")) if "base" in op.attrs else 10000,
        )
        shape = (1, x.shape[1], *([1] * (x.ndim - 3)), half)
        cos, sin = np.cos(angles).reshape(shape), np.sin(angles).reshape(shape)
        sin = -sin if op.flag("inverse") else sin
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return [np.concatenate([still, a * cos - b * sin, b * cos + a * sin, rest], axis=-1)]


def _position(op: Operation) -> Dim:
    return op.operands[0].tensor.dims[1]


def _angles(count: int, half: int, start: int, base: int) -> Array:
    frequency = float(base) ** (-np.arange(half) / max(half, 1))
    return (np.arange(count) + start)[:, None] * frequency[None, :]


OPS = (Attention(), AttentionGrad(), Rope())
