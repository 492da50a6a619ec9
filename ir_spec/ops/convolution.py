"""A convolution along a sequence, and its gradients.

A convolution whose patches do not overlap, such as the patch embedding of a vision transformer, is
`stg.reshape` and `stg.einsum`:

    %p = stg.reshape["bc(hp)(wq)->bchpwq", factors = (p, q), sizes = (P, P)](%image)
    %x = stg.einsum["bchpwq,cpqd->bhwd"](%p, %w)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, const, product
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir_spec.ops.base import stated

_STRIDE = Param("stride", "int", "positions between two windows (default 1)")
_PAD = Param("pad", "int", "zeros before the first position, and after the last (default 0)")


class Convolution(OpDef):
    """Base of a convolution and its gradients, over the factors b, t (positions), s (windows),
    k (width), c and d (channels). Positions are whole: windows overlap the parts of other ranks."""

    params: ClassVar[tuple[Param, ...]] = (_STRIDE, _PAD)

    def work(self, n: Sizes) -> Expr:
        """Multiply-adds, those with padding included."""
        return product(n[f] for f in "bskcd")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.work(n) * 2

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n)


def _windows(op: Operation, positions: int, windows: int, width: int) -> Array:
    """The position that each element of each window reads, [windows, width]; -1 is padding."""
    starts = np.arange(windows) * op.integer("stride", 1) - op.integer("pad", 0)
    found = starts[:, None] + np.arange(width)
    return np.where((found >= 0) & (found < positions), found, -1)


def _unfold(op: Operation, x: Array, windows: int, width: int) -> Array:
    """[b, windows, width, c] of [b, positions, c]."""
    padded = np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)
    return padded[:, _windows(op, x.shape[1], windows, width)]


class Conv1d(Convolution):
    """A convolution along dimension 1: x is [B, T, C], w is [width, C, D], the result
    [B, T/stride, D]; window i begins at position i * stride - pad.

    FLOPs: 2 per multiply-add, padding included, as PyTorch's FlopCounterMode counts: 2 * B *
    T/stride * width * C * D. Split over channels it is a product; positions are whole, so a split
    sequence is gathered.
    """

    name = "stg.conv1d"
    operands = ("x", "w")
    example = "%y = stg.conv1d[stride = 2, pad = 1](%x, %kernel) : bf16[B, S/2, F]"

    def rule(self, op: Operation) -> Rule:
        size = op.operands[0].tensor.shape[1:2]
        windows = size[0] / const(op.integer("stride", 1)) if size else const(1)
        return make_rule("btc,kcd->bsd", whole="tsk", sizes={"s": windows})

    def verify(self, op: Operation) -> Iterator[str]:
        width = op.operands[1].tensor.shape[0].value
        stride, pad = op.integer("stride", 1), op.integer("pad", 0)
        if stride < 1 or pad < 0:
            yield f"expects stride >= 1 and pad >= 0, found stride = {stride}, pad = {pad}"
        elif width is not None and not width - stride <= 2 * pad < width:
            yield (
                f"gives one window for each {stride} positions, so 2 * pad is at least width - "
                f"stride and less than width: found width = {width}, pad = {pad}"
            )

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        return _kernel(op, const(1), n["b"] * n["s"], n["d"], n["k"] * n["c"])

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,), (x, w) = grads, op.operands
        if dy is None:
            return [None, None]
        how: dict[str, RawAttr] = {**stated(op, self.params)}
        dx = {**how, "positions": x.tensor.shape[1]}
        dw = {**how, "width": w.tensor.shape[0]}
        return [
            b.value("stg.conv1d_dx", [dy, w], dx, hint=x.prefixed("d_")),
            b.value("stg.conv1d_dw", [x, dy], dw, hint=w.prefixed("d_")),
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, w = args
        windows = ctx.size(op.result.tensor.shape[1])
        return [np.einsum("bskc,kcd->bsd", _unfold(op, x, windows, w.shape[0]), w)]


class Conv1dDx(Convolution):
    """Gradient of `stg.conv1d` with respect to x; FLOPs as forward."""

    name = "stg.conv1d_dx"
    operands = ("dy", "w")
    params = (_STRIDE, _PAD, Param("positions", "size", "positions of x", required=True))
    example = (
        "%dx = stg.conv1d_dx[stride = 2, pad = 1, positions = S](%du, %kernel) : bf16[B, S, D]"
    )

    def rule(self, op: Operation) -> Rule:
        sizes = {"t": op.expr("positions")}
        return make_rule("bsd,kcd->btc", whole="tsk", sizes=sizes)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        return _kernel(op, const(1), n["b"] * n["s"], n["k"] * n["c"], n["d"])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, w = args
        positions = ctx.size(op.expr("positions"))
        out = np.zeros((positions + 1, dy.shape[0], w.shape[1]))
        places = _windows(op, positions, dy.shape[1], w.shape[0])
        np.add.at(out, places, np.einsum("bsd,kcd->skbc", dy, w))
        return [np.moveaxis(out[:positions], 0, 1)]


class Conv1dDw(Convolution):
    """Gradient of `stg.conv1d` with respect to w; FLOPs as forward."""

    name = "stg.conv1d_dw"
    operands = ("x", "dy")
    params = (_STRIDE, _PAD, Param("width", "size", "width of w", required=True))
    example = "%dk = stg.conv1d_dw[stride = 2, pad = 1, width = 3](%x, %du) : bf16[3, D, F]"

    def rule(self, op: Operation) -> Rule:
        return make_rule("btc,bsd->kcd", whole="tsk", sizes={"k": op.expr("width")})

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        return _kernel(op, const(1), n["k"] * n["c"], n["d"], n["b"] * n["s"])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, dy = args
        width = ctx.size(op.expr("width"))
        return [np.einsum("bskc,bsd->kcd", _unfold(op, x, dy.shape[1], width), dy)]


def _kernel(op: Operation, *extents: Expr) -> KernelShape:
    """The matrix product that a library computes: the windows are gathered as it goes along."""
    return KernelShape("matmul", op.operands[0].tensor.dtype, extents)


OPS = (Conv1d(), Conv1dDx(), Conv1dDw())
