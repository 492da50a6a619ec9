"""Normalisation over the last dimension: rmsnorm, layernorm, softmax, and their gradients.

The gradients of the norms recompute the row statistics from the input, so only the input is
stashed. Over a split last dimension each rank sums up its part of a row, one all_reduce brings the
sums of all parts together, and the op works on its part with these:

    %part = stg.einsum["abc,abc->ab", to = f32](%x, %x) : f32[B, S | sum(tp)]
    %squares = stg.all_reduce[over = tp](%part) : f32[B, S]
    %n = stg.rmsnorm(%x, %scale, %squares) : bf16[B, S, D@tp]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Quoted, Value
from stagec.ir.expr import Expr, evaluate, product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import Fusible, Trait
from stagec.support.diagnostics import error

_EPS = 1e-5
Axes = tuple[str, ...]


class RowOp(OpDef):
    """Base of ops over rows of the last dimension, as `signature` says: `x` are rows, `w` vectors
    of that dimension. `sums` more operands, one number for each row, are its statistics; without
    them it computes them itself. `costs` are the FLOPs per element without and with them."""

    signature = ("x", "x")
    sums = 1
    costs = (0, 0)
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(rows=True),)

    def rule(self, op: Operation) -> Rule:
        row = letters(op.operands[0].tensor.rank)
        table = {"x": row, "w": row[-1:]}
        given = [row[:-1]] * len(self.given(op))
        left, right = ([table[c] for c in side] for side in self.signature)
        text = ",".join(left + given) + "->" + ",".join(right)
        return make_rule(text, special="" if given else row[-1:])

    def given(self, op: Operation) -> Sequence[Value]:
        """The statistics that it is given."""
        return op.operands[len(self.signature[0]) :]

    def verify(self, op: Operation) -> Iterator[str]:
        if len(self.given(op)) not in (0, self.sums):
            yield f"expects {self.sums} statistics of its rows or none, found {len(self.given(op))}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        row = letters(op.operands[0].tensor.rank)
        return product(n[f] for f in row) * self.costs[bool(self.given(op))]

    def plain(self, op: Operation) -> Sequence[Value]:
        """Its operands, if it computes its statistics itself. Raises `DiagnosticError`."""
        if self.given(op):
            raise error(
                f"'{op.name}' has no gradient if it is given its statistics",
                op.loc,
                remedy="leave them out: it computes them itself",
            )
        return op.operands

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        """Build the statistics of rows that are split over these axes."""
        raise NotImplementedError

    def partition(self, b: Builder, op: Operation, special: Mapping[str, Axes]) -> Sequence[Value]:
        (over,) = special.values()
        operands = [*op.operands, *self.statistics(b, op, over)]
        return b.op(op.name, operands, op.attrs, names=[v.name for v in op.results]).results


def _dot(b: Builder, x: Value, y: Value, hint: str) -> Value:
    """The sum of products along each row; y may be a vector."""
    row = letters(x.tensor.rank)
    spec = Quoted(f"{row},{row if y.tensor.rank == len(row) else row[-1:]}->{row[:-1]}")
    return b.value("stg.einsum", [x, y], {"spec": spec, "to": "f32"}, hint=hint)


def _sum(b: Builder, x: Value, hint: str) -> Value:
    """The sum of each row."""
    row = letters(x.tensor.rank)
    if x.tensor.dtype != "f32":
        x = b.value("stg.cast", [x], {"to": "f32"}, hint=f"{hint}_wide")
    return b.value("stg.sum", [x], {"spec": Quoted(f"{row}->{row[:-1]}")}, hint=hint)


def _together(b: Builder, parts: Sequence[Value], over: Axes, kind: str = "sum") -> Sequence[Value]:
    """The statistics of whole rows from those of their parts, in one call."""
    attrs: dict[str, RawAttr] = {"over": over}
    if kind != "sum":
        attrs["kind"] = kind
    return b.op("stg.all_reduce", parts, attrs, names=[f"{v.name}_r" for v in parts]).results


def _length(op: Operation, ctx: NumericContext) -> int:
    """The elements of a whole row."""
    return ctx.size(op.operands[0].tensor.shape[-1])


class RmsNorm(RowOp):
    """x / rms(x) * scale (arXiv 1910.07467), 4 FLOPs per element; 2 if it is given the sums of the
    squares of the rows."""

    name = "stg.rmsnorm"
    operands = ("x", "scale", "squares*")
    signature = ("xw", "x")
    costs = (4, 2)
    example = "%n = stg.rmsnorm(%h, %g) : bf16[B, S, D]"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        x = op.operands[0]
        return _together(b, [_dot(b, x, x, f"{x.name}_squares")], over)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,), (x, w) = grads, self.plain(op)
        if dy is None:
            return [None, None]
        return b.op(
            "stg.rmsnorm_grad", [dy, x, w], names=[x.prefixed("d_"), w.prefixed("d_")]
        ).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, w, *given = args
        squares = given[0] if given else (x * x).sum(-1)
        return [x * _rsqrt(squares / _length(op, ctx)) * w]


def _rsqrt(x: Array) -> Array:
    """1/sqrt of a statistic of rows, for each of their elements."""
    return (1 / np.sqrt(x + _EPS))[..., None]


class RmsNormGrad(RowOp):
    """Gradient of `stg.rmsnorm` with respect to x and scale, 11 FLOPs per element; 6 if it is given
    the sums over the rows of x*x and dy*scale*x."""

    name = "stg.rmsnorm_grad"
    operands = ("dy", "x", "scale", "sums*")
    results = ("dx", "dscale")
    signature = ("xxw", "xw")
    sums = 2
    costs = (11, 6)
    example = "%dx, %dg = stg.rmsnorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D])"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, x, w = op.operands
        both = b.value("stg.mul", [dy, x], hint=f"{dy.name}_{x.name}")
        dots = [_dot(b, x, x, f"{x.name}_squares"), _dot(b, both, w, f"{both.name}_sum")]
        return _together(b, dots, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x, w, *given = args
        g, n = dy * w, _length(op, ctx)
        squares, inner = given or ((x * x).sum(-1), (g * x).sum(-1))
        r = _rsqrt(squares / n)
        dx = r * g - x * r**3 * inner[..., None] / n
        return [dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)]


class LayerNorm(RowOp):
    """(x - mean) / std * scale + bias (arXiv 1607.06450), 7 FLOPs per element; 4 if it is given the
    sums over the rows of x and x*x."""

    name = "stg.layernorm"
    operands = ("x", "scale", "bias", "sums*")
    signature = ("xww", "x")
    sums = 2
    costs = (7, 4)
    example = "%n = stg.layernorm(%h, %g, %b) : bf16[B, S, D]"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        x = op.operands[0]
        sums = [_sum(b, x, f"{x.name}_sum"), _dot(b, x, x, f"{x.name}_squares")]
        return _together(b, sums, over)

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,), (x, w, bias) = grads, self.plain(op)
        if dy is None:
            return [None, None, None]
        names = [v.prefixed("d_") for v in (x, w, bias)]
        return b.op("stg.layernorm_grad", [dy, x, w], names=names).results

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, w, b, *given = args
        xhat, _ = _standardize(x, given, _length(op, ctx))
        return [xhat * w + b]


class LayerNormGrad(RowOp):
    """Gradient of `stg.layernorm` with respect to x, scale and bias, 14 FLOPs per element; 6 if it
    is given the sums over the rows of x, x*x, dy*scale and dy*scale*x."""

    name = "stg.layernorm_grad"
    operands = ("dy", "x", "scale", "sums*")
    results = ("dx", "dscale", "dbias")
    signature = ("xxw", "xww")
    sums = 4
    costs = (14, 6)
    example = "%dx, %dg, %db = stg.layernorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D], bf16[D])"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, x, w = op.operands
        both = b.value("stg.mul", [dy, x], hint=f"{dy.name}_{x.name}")
        sums = [_sum(b, x, f"{x.name}_sum"), _dot(b, x, x, f"{x.name}_squares")]
        sums += [_dot(b, dy, w, f"{dy.name}_sum"), _dot(b, both, w, f"{both.name}_sum")]
        return _together(b, sums, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x, w, *given = args
        g, n = dy * w, _length(op, ctx)
        xhat, r = _standardize(x, given[:2], n)
        first, inner = given[2:] or (g.sum(-1), (g * x).sum(-1))
        mean = (given[0] if given else x.sum(-1)) / n
        along = (inner - mean * first)[..., None] * r / n  # the mean of g * xhat
        dx = r * (g - first[..., None] / n - xhat * along)
        flat = (-1, x.shape[-1])
        return [dx, (dy * xhat).reshape(flat).sum(0), dy.reshape(flat).sum(0)]


def _standardize(x: Array, given: Sequence[Array], n: int) -> tuple[Array, Array]:
    """(x - mean) / std, and 1/std, of rows of n elements with these sums of x and x*x."""
    total, squares = given or (x.sum(-1), (x * x).sum(-1))
    mean = total / n
    r = _rsqrt(squares / n - mean * mean)
    return (x - mean[..., None]) * r, r


class Softmax(RowOp):
    """softmax(x / sqrt(rsqrt)) over the last dimension, 5 FLOPs per element; 3 if it is given the
    maximum of each row and the sum of its exponentials.

    `causal` masks what lies after the position in the dimension before the last, as the fused
    scale-mask-softmax kernels do; masked elements are computed and stored. The last dimension is
    whole then: it is the sequence, whose splits are context parallelism.
    """

    name = "stg.softmax"
    operands = ("x", "statistics*")
    params = (
        Param("causal", "flag", "mask the future"),
        Param("rsqrt", "size", "scale by 1/sqrt of this"),
    )
    sums = 2
    costs = (5, 3)
    example = "%p = stg.softmax[causal, rsqrt = K](%scores) : bf16[B, H, S, S]"

    def rule(self, op: Operation) -> Rule:
        rule = super().rule(op)
        return replace(rule, whole=rule.special, special=frozenset()) if op.flag("causal") else rule

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if op.flag("causal") and self.given(op):
            yield "computes its statistics itself if it is causal"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        (x,) = op.operands
        row = letters(x.tensor.rank)
        spec = Quoted(f"{row}->{row[:-1]}")
        mine = b.value("stg.max", [x], {"spec": spec, "to": "f32"}, hint=f"{x.name}_top")
        (top,) = _together(b, [mine], over, "max")
        part = b.value("stg.sum_exp", [x, top], op.attrs, hint=f"{x.name}_exp")
        return [top, *_together(b, [part], over)]

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,), (x,) = grads, self.plain(op)
        attrs = {k: v for k, v in op.attrs.items() if k == "rsqrt"}
        return [dy and b.value("stg.softmax_grad", [dy, op.result], attrs, hint=x.prefixed("d_"))]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, *given = args
        seen = None
        if given:
            top, total = (v[..., None] for v in given)
            return [np.exp((x - top) * rsqrt_scale(op, ctx)) / total]
        if op.flag("causal"):
            rows, columns = op.operands[0].tensor.dims[-2:]
            seen = visible(ctx.positions(rows), ctx.positions(columns))
        return [softmax(x * rsqrt_scale(op, ctx), seen)]


class SoftmaxGrad(RowOp):
    """Gradient of `stg.softmax` from its result, 5 FLOPs per element; 3 if it is given the sums of
    dy*y over the rows."""

    name = "stg.softmax_grad"
    operands = ("dy", "y", "sums*")
    params = (Param("rsqrt", "size", "scale by 1/sqrt of this"),)
    signature = ("xx", "x")
    costs = (5, 3)
    example = "%dx = stg.softmax_grad[rsqrt = K](%dp, %p) : bf16[B, H, S, S]"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, y = op.operands
        return _together(b, [_dot(b, dy, y, f"{dy.name}_sum")], over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y, *given = args
        total = given[0] if given else (dy * y).sum(-1)
        return [y * (dy - total[..., None]) * rsqrt_scale(op, ctx)]


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
