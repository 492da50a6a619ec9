"""Normalisation over the last dimension: rmsnorm, layernorm, softmax, and their gradients.

The gradients of the norms recompute the row statistics from the input, so only the input is
stashed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, evaluate, product
from stagec.ir.opdef import Array, NumericContext, OpDef, Param, Sizes
from stagec.ir.rule import Rule, letters, make_rule

_EPS = 1e-5


def _row_rule(op: Operation, operands: str, results: str) -> Rule:
    """A rule over rows `x` and vectors `w` of the last dimension, which stays whole."""
    row = letters(op.operands[0].tensor.rank)
    table = {"x": row, "w": row[-1:]}
    text = ",".join(table[c] for c in operands) + "->" + ",".join(table[c] for c in results)
    return make_rule(text, whole=row[-1:])


def _row_work(n: Sizes, op: Operation, per_element: int) -> Expr:
    return product(n[f] for f in letters(op.operands[0].tensor.rank)) * per_element


class RmsNorm(OpDef):
    """x / rms(x) * scale (arXiv 1910.07467), 4 FLOPs per element."""

    name = "stg.rmsnorm"
    operands = ("x", "scale")
    example = "%n = stg.rmsnorm(%h, %g) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        return _row_rule(op, "xw", "x")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _row_work(n, op, 4)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        if dy is None:
            return [None, None]
        x, w = op.operands
        return b.op("stg.rmsnorm_grad", [dy, x, w], names=[f"d_{x.name}", f"d_{w.name}"]).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, w = args
        return [x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS) * w]


class RmsNormGrad(OpDef):
    """Gradient of `stg.rmsnorm` with respect to x and scale, 11 FLOPs per element."""

    name = "stg.rmsnorm_grad"
    operands = ("dy", "x", "scale")
    results = ("dx", "dscale")
    example = "%dx, %dg = stg.rmsnorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D])"

    def rule(self, op: Operation) -> Rule:
        return _row_rule(op, "xxw", "xw")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _row_work(n, op, 11)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x, w = args
        r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS)
        g = dy * w
        dx = r * g - x * r**3 * (g * x).mean(-1, keepdims=True)
        return [dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)]


class LayerNorm(OpDef):
    """(x - mean) / std * scale + bias (arXiv 1607.06450), 7 FLOPs per element."""

    name = "stg.layernorm"
    operands = ("x", "scale", "bias")
    example = "%n = stg.layernorm(%h, %g, %b) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        return _row_rule(op, "xww", "x")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _row_work(n, op, 7)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        if dy is None:
            return [None, None, None]
        x, w, bias = op.operands
        names = [f"d_{v.name}" for v in (x, w, bias)]
        return b.op("stg.layernorm_grad", [dy, x, w], names=names).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, w, b = args
        xhat, _ = _standardize(x)
        return [xhat * w + b]


class LayerNormGrad(OpDef):
    """Gradient of `stg.layernorm` with respect to x, scale and bias, 14 FLOPs per element."""

    name = "stg.layernorm_grad"
    operands = ("dy", "x", "scale")
    results = ("dx", "dscale", "dbias")
    example = "%dx, %dg, %db = stg.layernorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D], bf16[D])"

    def rule(self, op: Operation) -> Rule:
        return _row_rule(op, "xxw", "xww")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _row_work(n, op, 14)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x, w = args
        xhat, r = _standardize(x)
        g = dy * w
        dx = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
        flat = (-1, x.shape[-1])
        return [dx, (dy * xhat).reshape(flat).sum(0), dy.reshape(flat).sum(0)]


def _standardize(x: Array) -> tuple[Array, Array]:
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + _EPS)
    return centred * r, r


class Softmax(OpDef):
    """softmax(x / sqrt(rsqrt)) over the last dimension, 5 FLOPs per element.

    `causal` masks what lies after the position in the dimension before the last, as the fused
    scale-mask-softmax kernels do; masked elements are computed and stored.
    """

    name = "stg.softmax"
    operands = ("x",)
    params = (
        Param("causal", "flag", "mask the future"),
        Param("rsqrt", "size", "scale by 1/sqrt of this"),
    )
    example = "%p = stg.softmax[causal, rsqrt = K](%scores) : bf16[B, H, S, S]"

    def rule(self, op: Operation) -> Rule:
        return _row_rule(op, "x", "x")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _row_work(n, op, 5)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        attrs = {k: v for k, v in op.attrs.items() if k == "rsqrt"}
        return [
            dy
            and b.value("stg.softmax_grad", [dy, op.result], attrs, hint=f"d_{op.operands[0].name}")
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        seen = None
        if op.flag("causal"):
            rows, columns = op.operands[0].tensor.dims[-2:]
            seen = visible(ctx.positions(rows), ctx.positions(columns))
        return [softmax(args[0] * rsqrt_scale(op, ctx), seen)]


class SoftmaxGrad(OpDef):
    """Gradient of `stg.softmax` from its result, 5 FLOPs per element."""

    name = "stg.softmax_grad"
    operands = ("dy", "y")
    params = (Param("rsqrt", "size", "scale by 1/sqrt of this"),)
    example = "%dx = stg.softmax_grad[rsqrt = K](%dp, %p) : bf16[B, H, S, S]"

    def rule(self, op: Operation) -> Rule:
        return _row_rule(op, "xx", "x")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _row_work(n, op, 5)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y = args
        return [y * (dy - (dy * y).sum(-1, keepdims=True)) * rsqrt_scale(op, ctx)]


def rsqrt_scale(op: Operation, ctx: NumericContext) -> float:
    """1/sqrt of the parameter `rsqrt`, 1 without it."""
    value = op.attrs.get("rsqrt")
    return float(evaluate(value, ctx.env)) ** -0.5 if isinstance(value, Expr) else 1.0


def visible(rows: Sequence[int], columns: Sequence[int]) -> Array:
    """Which columns a causal mask leaves to each row, both given by their global positions."""
    return np.asarray(rows)[:, None] >= np.asarray(columns)[None, :]


def softmax(x: Array, seen: Array | None) -> Array:
    """Softmax over the last axis, of what is seen if a mask is given."""
    if seen is not None:
        x = np.where(seen, x, -np.inf)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


OPS = (RmsNorm(), RmsNormGrad(), LayerNorm(), LayerNormGrad(), Softmax(), SoftmaxGrad())
