"""Convolutions along one dimension or two, and their gradients.

A convolution whose patches do not overlap, such as the patch embedding of a vision transformer, is
`stg.reshape` and `stg.einsum`:

    %p = stg.reshape["bc(hp)(wq)->bchpwq", factors = (p, q), sizes = (P, P)](%image)
    %x = stg.einsum["bchpwq,cpqd->bhwd"](%p, %w)
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation
from stagec.ir.expr import ONE, Expr, const, product
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir_spec.ops.base import present, stated

_STRIDE = Param("stride", "int", "positions between two windows (default 1)")
_PAD = Param("pad", "int", "zeros before the first position, and after the last (default 0)")


class Convolution(OpDef):
    """Base class of a convolution and its gradients, over the factors b, positions t and u, windows
    s and z, widths k and l, g (groups), and c and d (channels). Positions cannot be split, since
    windows overlap the parts of other ranks. `space` is the number of spatial dimensions."""

    params: ClassVar[tuple[Param, ...]] = (_STRIDE, _PAD)
    space: ClassVar[int] = 1

    def letters(self, op: Operation) -> tuple[str, str, str]:
        """The factors of x, of w and of the result; with groups, each has one more dimension."""
        n = self.space
        g = "g" if op.operands[0].tensor.rank == n + 3 else ""
        return f"b{'tu'[:n]}{g}c", f"{'kl'[:n]}{g}cd", f"b{'sz'[:n]}{g}d"

    def whole(self, x: str, w: str, y: str) -> str:
        """The factors that cannot be split."""
        return "".join(letter for letter in x + w + y if letter in "tuklsz")

    def work(self, n: Sizes) -> Expr:
        """The number of multiply-adds, including those with padding."""
        return product(n[f] for f in "bszklgcd" if f in n)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.work(n) * 2

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n)


def _part(n: Sizes, factors: str) -> Expr:
    return product(n[f] for f in factors if f in n)


def _kernel(op: Operation, n: Sizes, rows: str, columns: str, inner: str) -> KernelShape | None:
    """The matrix product that a library computes, which gathers the windows on the fly; None for
    groups of one channel."""
    if "g" in n and n["c"] == ONE and n["d"] == ONE:
        return None
    extents = tuple(_part(n, factors) for factors in ("g", rows, columns, inner))
    return KernelShape("matmul", op.operands[0].tensor.dtype, extents)


def _windows(op: Operation, positions: int, windows: int, width: int) -> Array:
    """The position that each element of each window reads, [windows, width]; -1 is padding."""
    starts = np.arange(windows) * op.integer("stride", 1) - op.integer("pad", 0)
    places = starts[:, None] + np.arange(width)
    return np.where((places >= 0) & (places < positions), places, -1)


def _places(
    op: Operation, x: Sequence[int], windows: Sequence[int], widths: Sequence[int]
) -> tuple[Array, ...]:
    """The index of [b, windows..., widths...] into [b, positions + 1...], where the last position
    of each dimension is padding; `x` are the sizes of b and of positions."""
    count = len(windows)
    places: list[Array] = [np.arange(x[0]).reshape(-1, *[1] * (2 * count))]
    for i, sizes in enumerate(zip(x[1:], windows, widths, strict=False), 1):
        shape = [1] * (1 + 2 * count)
        shape[i], shape[count + i] = sizes[1:]
        places.append(_windows(op, *sizes).reshape(shape))
    return tuple(places)


def _unfold(op: Operation, x: Array, windows: Sequence[int], widths: Sequence[int]) -> Array:
    """[b, windows..., widths..., channels] of [b, positions..., channels]."""
    around = [(0, 1) if 0 < i <= len(windows) else (0, 0) for i in range(x.ndim)]
    unfolded: Array = np.pad(x, around)[_places(op, x.shape, windows, widths)]
    return unfolded


def _unfolded(x: str, w: str, y: str) -> str:
    """The letters of the result of `_unfold`."""
    space = sum(letter in "tu" for letter in x)
    return f"b{y[1 : 1 + space]}{w[:space]}{x[1 + space :]}"


class Conv1d(Convolution):
    """A convolution along dimension 1: x is [B, T, C], w is [width, C, D], the result [B, S, D];
    window i begins at position i * stride - pad. With groups x is [B, T, G, C], w is [width, G, C,
    D].

    S is T/stride if padding compensates for the width, such as width 3 with pad = 1; otherwise (T +
    2 * pad - width)/stride + 1, which must be whole. FLOPs: 2 per multiply-add, including padding,
    as PyTorch's FlopCounterMode counts: 2 * B * S * width * C * D. It can be split over channels or
    groups like a product; positions cannot be split, so a split sequence is gathered.
    """

    name = "stg.conv1d"
    operands = ("x", "w")
    example = "%y = stg.conv1d[stride = 2, pad = 1](%x, %kernel) : bf16[B, S/2, F]"

    def rule(self, op: Operation) -> Rule:
        x, w, y = self.letters(op)
        positions, widths = (v.tensor.shape for v in op.operands)
        sizes = {
            y[1 + i]: _count(op, positions[1 + i], widths[i])
            for i in range(self.space)
            if 1 + i < len(positions) and i < len(widths)
        }
        return make_rule(f"{x},{w}->{y}", whole=self.whole(x, w, y), sizes=sizes)

    def verify(self, op: Operation) -> Iterator[str]:
        stride, pad = op.integer("stride", 1), op.integer("pad", 0)
        if stride < 1 or pad < 0:
            yield f"expects stride >= 1 and pad >= 0, found stride = {stride}, pad = {pad}"

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        return _kernel(op, n, "bsz", "d", "klc")

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        dy, (x, w) = present(grads[0]), op.operands
        how: dict[str, RawAttr] = {**stated(op, self.params)}
        one = self.space == 1
        positions, widths = x.tensor.shape[1 : 1 + self.space], w.tensor.shape[: self.space]
        dx = {**how, "positions": positions[0] if one else tuple(positions)}
        dw = {**how, "width": widths[0] if one else tuple(widths)}
        return [
            b.value(f"{self.name}_dx", [dy, w], dx, hint=x.prefixed("d_")),
            b.value(f"{self.name}_dw", [x, dy], dw, hint=w.prefixed("d_")),
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, w = args
        windows = [ctx.size(e) for e in op.result.tensor.shape[1 : 1 + self.space]]
        letters = self.letters(op)
        unfolded = _unfold(op, x, windows, w.shape[: self.space])
        return [np.einsum(f"{_unfolded(*letters)},{letters[1]}->{letters[2]}", unfolded, w)]


class Conv1dDx(Convolution):
    """Gradient of `stg.conv1d` with respect to x; FLOPs as forward."""

    name = "stg.conv1d_dx"
    operands = ("dy", "w")
    params = (_STRIDE, _PAD, Param("positions", "size", "positions of x", required=True))
    example = (
        "%dx = stg.conv1d_dx[stride = 2, pad = 1, positions = S](%du, %kernel) : bf16[B, S, D]"
    )

    def rule(self, op: Operation) -> Rule:
        x, w, y = self.letters(op)
        sizes = dict(zip("tu", _sizes(op, "positions", self.space), strict=False))
        return make_rule(f"{y},{w}->{x}", whole=self.whole(x, w, y), sizes=sizes)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        return _kernel(op, n, "bsz", "klc", "d")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, w = args
        x, kernel, y = self.letters(op)
        positions = [ctx.size(e) for e in _sizes(op, "positions", self.space)]
        out = np.zeros((len(dy), *(n + 1 for n in positions), *w.shape[self.space : -1]))
        windows = dy.shape[1 : 1 + self.space]
        places = _places(op, [len(dy), *positions], windows, w.shape[: self.space])
        np.add.at(out, places, np.einsum(f"{y},{kernel}->{_unfolded(x, kernel, y)}", dy, w))
        return [out[(slice(None), *(slice(n) for n in positions))]]


class Conv1dDw(Convolution):
    """Gradient of `stg.conv1d` with respect to w; FLOPs as forward."""

    name = "stg.conv1d_dw"
    operands = ("x", "dy")
    params = (_STRIDE, _PAD, Param("width", "size", "width of w", required=True))
    example = "%dk = stg.conv1d_dw[stride = 2, pad = 1, width = 3](%x, %du) : bf16[3, D, F]"

    def rule(self, op: Operation) -> Rule:
        x, w, y = self.letters(op)
        sizes = dict(zip("kl", _sizes(op, "width", self.space), strict=False))
        return make_rule(f"{x},{y}->{w}", whole=self.whole(x, w, y), sizes=sizes)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        return _kernel(op, n, "klc", "d", "bsz")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, dy = args
        letters = self.letters(op)
        widths = [ctx.size(e) for e in _sizes(op, "width", self.space)]
        unfolded = _unfold(op, x, dy.shape[1 : 1 + self.space], widths)
        return [np.einsum(f"{_unfolded(*letters)},{letters[2]}->{letters[1]}", unfolded, dy)]


class Conv2d(Conv1d):
    """A convolution along dimensions 1 and 2: x is [B, Y, X, C], w is [height, width, C, D], the
    result [B, Y', X', D]. With groups x is [B, Y, X, G, C], w is [height, width, G, C, D]: with C =
    D = 1 it is depth-wise.

    `stride` and `pad` are those of both dimensions; sizes and FLOPs as of `stg.conv1d`.
    """

    name = "stg.conv2d"
    space = 2
    example = "%y = stg.conv2d[pad = 1](%pixels, %square) : bf16[B, 8, 8, F]"


class Conv2dDx(Conv1dDx):
    """Gradient of `stg.conv2d` with respect to x; FLOPs as forward."""

    name = "stg.conv2d_dx"
    space = 2
    params = (_STRIDE, _PAD, Param("positions", "sizes", "positions of x", required=True))
    example = "%dx = stg.conv2d_dx[pad = 1, positions = (8, 8)](%dp, %square) : bf16[B, 8, 8, D]"


class Conv2dDw(Conv1dDw):
    """Gradient of `stg.conv2d` with respect to w; FLOPs as forward."""

    name = "stg.conv2d_dw"
    space = 2
    params = (_STRIDE, _PAD, Param("width", "sizes", "height and width of w", required=True))
    example = "%dk = stg.conv2d_dw[pad = 1, width = (3, 3)](%pixels, %dp) : bf16[3, 3, D, F]"


def _sizes(op: Operation, name: str, space: int) -> Sequence[Expr]:
    return [op.expr(name)] if space == 1 else op.exprs(name)


def _count(op: Operation, positions: Expr, width: Expr) -> Expr:
    """The number of windows."""
    stride, pad = op.integer("stride", 1), op.integer("pad", 0)
    if width.value is not None and width.value - stride <= 2 * pad < width.value:
        return positions / const(stride)
    return (positions + 2 * pad - width) / const(stride) + 1
