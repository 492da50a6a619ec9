"""Attention as one fused kernel, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, product
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import Fusible
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.attention_core import (
    CAUSAL,
    backward,
    core_flops,
    core_kernel,
    core_rule,
    forward,
    key_rows,
    masked,
    scores_of,
    unpack,
)
from stagec.ir_spec.ops.base import need_result
from stagec.ir_spec.ops.ring import ring_backward, ring_forward
from stagec.ir_spec.ops.strategy import ORDERS

_PARAMS = (
    CAUSAL,
    Param("ring", "name", "keys and values go round the ranks, in this order", choices=ORDERS),
)


def _rule(op: Operation, text: str, before: int) -> Rule:
    """In a ring keys and values are split as the queries are."""
    factor = "s" if "ring" in op.attrs else "t"
    return core_rule(op, text, before, factor, special=factor)


def _computed(op: Operation, q: int, flops: Expr) -> Expr:
    """What kernels compute, masks ignored; `q` is the operand with the queries. Where these are
    split over n ranks, and keys are not, a causal mask hides from rank i all parts of the keys but
    the first i + 1, and kernels leave them out: (n+1)/2 of n parts, in the mean over the ranks."""
    rows, columns = key_rows(op, q)
    n = axis_size(a for a in rows.axes if a not in columns.axes)
    hides = op.flag("causal") and rows.size == columns.size
    return flops * (n + 1) / (n * 2) if hides else flops


def _executed(op: Operation, flops: Expr) -> Expr:
    """What a causal mask leaves: half, in the mean over the ranks."""
    return flops / 2 if op.flag("causal") else flops


def _kernel(op: Operation, kind: str, n: Sizes) -> KernelShape:
    """With all keys: where queries are split, and keys are not, a causal mask leaves half of them
    in the mean over the ranks."""
    return core_kernel(kind, op.operands[0].tensor.dtype, n, n.get("t", n["s"]), op.flag("causal"))


class Attention(OpDef):
    """softmax(q k^T / sqrt(K)) v as a FlashAttention kernel (arXiv 2205.14135), grouped queries
    included.

    Operands are q and a packed kv ([B, 2, S, G, K]), or q, k and v; the heads of v may have a size
    of their own, as in multi-head latent attention (arXiv 2405.04434). The second result, the row
    log-sum-exp in fp32, is there if backward needs it. FLOPs are those of the two products, half of
    them when causal; the softmax inside the kernel is not counted, as in the FlashAttention papers.
    With `ring` all are split alike along the sequence, and a split becomes ring attention.
    """

    name = "stg.attention"
    operands = ("q", "k", "v*")
    results = ("result", "lse?")
    params = _PARAMS
    example = "%a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        return _rule(op, "bs(gr)k,{kv}->bs(gr){v},b(gr)s", 1)

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "f32"]

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) not in (2, 3):
            yield "expects q and kv, or q, k and v"
        elif len(op.operands) == 2 and op.operands[1].tensor.shape[1] != 2:
            yield f"dimension 1 of kv holds keys and values, so it must be 2: {op.operands[1].type}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _executed(op, core_flops(n, 1, 1))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return _computed(op, 0, core_flops(n, 1, 1))

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, "attention", n)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        dy = grads[0]
        if dy is None:
            return [None] * len(op.operands)
        attrs = {k: v for k, v in op.attrs.items() if k != "phase"}
        operands = [dy, op.results[0], need_result(op, 1, "lse"), *op.operands]
        names = [v.prefixed("d_") for v in op.operands]
        return b.op("stg.attention_grad", operands, attrs, names=names).results

    def partition(
        self, b: Builder, op: Operation, special: Mapping[str, tuple[str, ...]]
    ) -> Sequence[Value]:
        return (
            ring_forward(b, op, special["s"])
            if "s" in special
            else super().partition(b, op, special)
        )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        q, k, v = unpack(args)
        return forward(q, v, masked(op, ctx, ctx, 0, scores_of(q, k)))


class AttentionGrad(OpDef):
    """Gradient of `stg.attention`: five products, as the kernel recomputes the scores; half when
    causal."""

    name = "stg.attention_grad"
    operands = ("dy", "y", "lse", "q", "k", "v*")
    results = ("dq", "dk", "dv?")
    params = _PARAMS
    example = (
        "%dq, %dk, %dv = stg.attention_grad[causal](%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, S, H, K], bf16[B, S, G, K], bf16[B, S, G, K])"
    )

    def rule(self, op: Operation) -> Rule:
        return _rule(op, "bs(gr){v},bs(gr){v},b(gr)s,bs(gr)k,{kv}->bs(gr)k,{kv}", 4)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _executed(op, core_flops(n, 3, 2))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return _computed(op, 3, core_flops(n, 3, 2))

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, "attention_backward", n)

    def partition(
        self, b: Builder, op: Operation, special: Mapping[str, tuple[str, ...]]
    ) -> Sequence[Value]:
        return (
            ring_backward(b, op, special["s"])
            if "s" in special
            else super().partition(b, op, special)
        )

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        _, k, _ = unpack(args[3:])
        return backward(args, masked(op, ctx, ctx, 3, scores_of(args[3], k)))


class Rope(OpDef):
    """Rotary position embedding (arXiv 2104.09864) of [B, S, heads, K] along dimension 1; 3 FLOPs
    per rotated element.

    With `last` only that many elements at the end of each head are rotated. `inverse` rotates back,
    which is its gradient.
    """

    name = "stg.rope"
    traits = (Fusible(),)
    operands = ("x",)
    params = (
        Param("base", "size", "the base of the frequencies (default 10000)"),
        Param("last", "size", "how many elements are rotated (default all)"),
        Param("inverse", "flag", "rotate by the negative angle"),
    )
    example = "%q2 = stg.rope[base = 500000](%q) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        text = letters(op.operands[0].tensor.rank)
        return make_rule(f"{text}->{text}", whole=text[-1], each=[0])

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
        return [dy and b.value("stg.rope", [dy], attrs, hint=op.operands[0].prefixed("d_"))]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        last = ctx.size(op.expr("last")) if "last" in op.attrs else args[0].shape[-1]
        still, x = args[0][..., :-last], args[0][..., -last:]
        half = last // 2
        angles = _angles(
            ctx.positions(op.operands[0].tensor.dims[1]),
            half,
            ctx.size(op.expr("base")) if "base" in op.attrs else 10000,
        )
        shape = (1, x.shape[1], *([1] * (x.ndim - 3)), half)
        cos, sin = np.cos(angles).reshape(shape), np.sin(angles).reshape(shape)
        sin = -sin if op.flag("inverse") else sin
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return [np.concatenate([still, a * cos - b * sin, b * cos + a * sin, rest], axis=-1)]


def _angles(positions: Sequence[int], half: int, base: int) -> Array:
    frequency = float(base) ** (-np.arange(half) / max(half, 1))
    return np.asarray(positions)[:, None] * frequency[None, :]


OPS = (Attention(), AttentionGrad(), Rope())
