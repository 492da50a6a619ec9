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
from stagec.ir.expr import ONE, Expr, const, evaluate, fraction, product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, LocalSize, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.serving import ServingStep
from stagec.ir.traits import Fusible, Trait, Wide
from stagec.ir_spec.ops.base import gradients
from stagec.ir_spec.ops.contraction import cast_to
from stagec.ir_spec.ops.serving import AHEAD, PAST, first_key, past_of
from stagec.support.diagnostics import error

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
        left, right = ([table[c] for c in side] for side in self.sides(op))
        text = ",".join(left + given) + "->" + ",".join(right)
        return make_rule(text, special="" if given else row[-1:])

    def sides(self, op: Operation) -> tuple[str, str]:
        """Its signature, with the vectors that this one has."""
        return self.signature

    def given(self, op: Operation) -> Sequence[Value]:
        """The statistics that it is given."""
        return op.operands[len(self.sides(op)[0]) :]

    def verify(self, op: Operation) -> Iterator[str]:
        if len(self.given(op)) not in (0, self.sums):
            yield f"expects {self.sums} statistics of its rows or none, found {len(self.given(op))}"

    def saved(self, op: Operation) -> int:
        """FLOPs per element that it saves because it lacks a vector."""
        return 0

    def flops(self, op: Operation, n: Sizes) -> Expr:
        row = letters(op.operands[0].tensor.rank)
        cost = self.costs[bool(self.given(op))] - self.saved(op)
        return product(n[f] for f in row) * cost

    def plain(self, op: Operation) -> Sequence[Value]:
        """Its operands, if it computes its statistics itself. Raises `DiagnosticError`."""
        if self.given(op):
            raise error(
                f"'{op.name}' has no gradient when its statistics are operands",
                op.loc,
                remedy="leave the statistics out: the op computes them itself",
            )
        return op.operands

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        """Build the statistics of rows that are split over these axes."""
        raise NotImplementedError

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        (over,) = special.values()
        operands = [*op.operands, *self.statistics(b, op, over)]
        return b.op(op.name, operands, op.attrs, names=[v.name for v in op.results]).results


def _dot(b: Builder, x: Value, y: Value, hint: str) -> Value:
    """The sum of products along each row."""
    row = letters(x.tensor.rank)
    spec = Quoted(f"{row},{row}->{row[:-1]}")
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


_EPS = Param("eps", "ratio", "is added to the mean square or variance (default 1/100000)")
_AFFINE = Param(
    "affine",
    "name",
    "the vectors that it has (default full)",
    choices=("full", "scale", "none"),
    default="full",
)
_ZERO_CENTERED = Param("zero_centered", "flag", "the scale is 1 + w of the vector w that is given")
_NORM_PARAMS = (_AFFINE, _ZERO_CENTERED, _EPS)
_WIDE_SCALE = Param("wide_scale", "flag", "eager software scales in fp32 and casts then")
_GIVEN_INPUT = Param(
    "given_input", "flag", "eager software casts x for its mean square alone, and keeps both"
)
_CODE = Param(
    "code",
    "name",
    "how model code computes it: by a kernel (the default), by one in fp32 (wide), or operation by "
    "operation in fp32 (stepwise)",
    choices=("kernel", "wide", "stepwise"),
    default="kernel",
)
_STEPS = Param("steps", "flag", "backward runs operation by operation, as that of eager PyTorch")
#: What eager backward holds beside its operands and dx: x^(2-1), 2x of it and the mean's gradient
#: for each element (`pow_backward` and `mean_backward` of derivatives.yaml).
_STEPPED = 3


class WithVectors(RowOp):
    """Base of norms and of their gradients. `full` is how many vectors a norm has at most: a scale,
    then a bias; `sums_up` says that the op is a gradient, which sums up those of its vectors."""

    params: ClassVar[tuple[Param, ...]] = _NORM_PARAMS
    full: ClassVar[int] = 1
    sums_up: ClassVar[bool] = False

    def vectors(self, op: Operation) -> int:
        """How many vectors the norm has."""
        return {"full": self.full, "scale": 1, "none": 0}[op.text("affine")]

    def scale(self, op: Operation) -> Value | None:
        """The vector w."""
        return op.operands[2 if self.sums_up else 1] if self.vectors(op) else None

    def sides(self, op: Operation) -> tuple[str, str]:
        count = self.vectors(op)
        if self.sums_up:
            return "xx" + "w" * min(count, 1), "x" + "w" * count
        return "x" + "w" * count, "x"

    def saved(self, op: Operation) -> int:
        """Without a bias 1; without a scale 1, and for the gradient 3."""
        count = self.vectors(op)
        scale = 0 if count else 3 if self.sums_up else 1
        return scale + (1 if self.full == 2 and count < 2 else 0)

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("zero_centered") and not self.vectors(op):
            yield "expects a scale with 'zero_centered'"

    def rule(self, op: Operation) -> Rule:
        least = len(self.sides(op)[0])
        if len(op.operands) not in (least, least + self.sums):
            raise error(
                f"'{op.name}' expects {least} operands with affine = {op.text('affine')}, or "
                f"{self.sums} more for the statistics of rows, found {len(op.operands)}",
                op.loc,
                remedy="give the vectors of 'affine': weight and bias for full, weight for "
                "scale, nothing for none",
            )
        return super().rule(op)

    def weighted(self, b: Builder, op: Operation, x: Value) -> Value:
        """x times the scale, element by element."""
        w, hint = self.scale(op), f"{x.name}_scaled"
        if w is None:
            return x
        row = letters(x.tensor.rank)
        y = b.value("stg.einsum", [x, w], {"spec": Quoted(f"{row},{row[-1:]}->{row}")}, hint=hint)
        return b.value("stg.add", [x, y], hint=hint) if op.flag("zero_centered") else y

    def scaled(self, op: Operation, x: Array, args: Sequence[Array]) -> Array:
        """x times the scale, of the numbers that the operands have."""
        if not self.vectors(op):
            return x
        w = args[2 if self.sums_up else 1]
        return x * (1 + w if op.flag("zero_centered") else w)


class NormBase(WithVectors):
    """Base of norms, whose gradient op is `<name>_grad`."""

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        given = [*grads, *self.plain(op)[: 1 + min(self.vectors(op), 1)]]
        return gradients(b, op, given)[: len(op.operands)]


class RmsNorm(NormBase):
    """x / rms(x) * scale (arXiv 1910.07467), 4 FLOPs per element; 2 if it is given the sums of the
    squares of the rows.

    With `affine = none` it has no scale, and 1 FLOP less.
    """

    name = "stg.rmsnorm"
    params = (*_NORM_PARAMS, _WIDE_SCALE, _GIVEN_INPUT, _STEPS)
    operands = ("x", "scale and squares*")
    costs = (4, 2)
    example = "%n = stg.rmsnorm(%h, %g) : bf16[B, S, D]"

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"rmsnorm": self._unfused}

    def _unfused(self, b: Builder, op: Operation, on_rank: LocalSize) -> Sequence[Value]:
        """In fp32, cast back and scaled, as `LlamaRMSNorm` of transformers; a zero-centered scale
        is applied in fp32, as in `Gemma3RMSNorm`, and a wide one, as in `Olmo2RMSNorm`. With
        `given_input` x is multiplied as it is given, as in `T5LayerNorm`."""
        x, w = op.operands[0], self.scale(op)
        dtype, name = x.tensor.dtype, op.result.name
        row, wide = letters(x.tensor.rank), cast_to(b, x, "f32")
        if op.flag(_GIVEN_INPUT.name) and w is not None:
            rows = {"spec": Quoted(f"{row},{row[:-1]}->{row}")}
            root = cast_to(b, _root_of_squares(b, op, wide), dtype)
            y = b.value("stg.einsum", [x, root], rows, hint=f"{name}_hat")
            rows = {"spec": Quoted(f"{row},{row[-1:]}->{row}")}
            return [b.value("stg.einsum", [y, w], rows, hint=name)]
        given = {n: v for n, v in op.attrs.items() if n == _EPS.name}
        in_wide = op.flag("zero_centered") or op.flag("wide_scale")
        plain: dict[str, RawAttr] = {"affine": "none", "steps": True, **given}
        plain |= {"wide_scale": True} if in_wide and w is not None else {}
        y = b.value(self.name, [wide], plain, hint=f"{name}_hat")
        if w is None:
            return [cast_to(b, y, dtype)]
        w, y = (cast_to(b, w, "f32"), y) if in_wide else (w, cast_to(b, y, dtype))
        if op.flag("zero_centered"):
            one = b.value("stg.constant", attrs={"value": 1}, hint=f"{name}_one")
            spec = {"spec": Quoted(f"{row[-1:]},->{row[-1:]}")}
            w = b.value("stg.add", [w, one], spec, hint=f"{name}_scale")
        spec = {"spec": Quoted(f"{row},{row[-1:]}->{row}")}
        y = b.value("stg.einsum", [y, w], spec, hint=f"{name}_wide" if in_wide else name)
        return [cast_to(b, y, dtype)]

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        x = op.operands[0]
        return _together(b, [_dot(b, x, x, f"{x.name}_squares")], over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, given = args[0], args[len(self.sides(op)[0]) :]
        squares = given[0] if given else (x * x).sum(-1)
        return [self.scaled(op, x * _rsqrt(op, squares / _length(op, ctx)), args)]


def _root_of_squares(b: Builder, op: Operation, x: Value) -> Value:
    """1/sqrt of the mean square of each row and `eps`."""
    row, name = letters(x.tensor.rank), op.result.name
    squares = b.value("stg.power", [x], {"exponent": const(2)}, hint=f"{name}_squares")
    total = b.value(
        "stg.sum", [squares], {"spec": Quoted(f"{row}->{row[:-1]}")}, hint=f"{name}_sum"
    )
    share, eps = ONE / x.tensor.shape[-1], op.expr("eps") if "eps" in op.attrs else ONE / 100000
    mean = b.value("stg.scale", [total], {"by": share}, hint=f"{name}_mean")
    least = b.value("stg.constant", attrs={"value": eps}, hint=f"{name}_eps")
    spec = Quoted(f"{row[:-1]},->{row[:-1]}")
    mean = b.value("stg.add", [mean, least], {"spec": spec}, hint=mean.name)
    return b.value("stg.power", [mean], {"exponent": -ONE / 2}, hint=f"{name}_root")


def _rsqrt(op: Operation, x: Array) -> Array:
    """1/sqrt of a statistic of rows, for each of their elements."""
    eps = float(fraction(op.expr("eps"))) if "eps" in op.attrs else 1e-5
    return (1 / np.sqrt(x + eps))[..., None]


class RmsNormGrad(WithVectors):
    """Gradient of `stg.rmsnorm` with respect to x and scale, 11 FLOPs per element; 6 if it is given
    the sums over the rows of x*x and dy*scale*x. 3 less without a scale.

    With `steps` its last results are buffers of the size of x that it needs while it runs, for
    gradients of the square and of the mean.
    """

    name = "stg.rmsnorm_grad"
    params = (*_NORM_PARAMS, _STEPS)
    operands = ("dy", "x", "scale and sums*")
    results = ("dx", "dscale and buffers*")
    sums = 2
    sums_up = True
    costs = (11, 6)
    example = "%dx, %dg = stg.rmsnorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D])"

    def sides(self, op: Operation) -> tuple[str, str]:
        left, right = super().sides(op)
        return left, right + "x" * (_STEPPED if op.flag("steps") else 0)

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, x = op.operands[:2]
        dn = self.weighted(b, op, dy)
        dots = [_dot(b, x, x, f"{x.name}_squares"), _dot(b, dn, x, f"{dn.name}_{x.name}")]
        return _together(b, dots, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x = args[:2]
        given = args[len(self.sides(op)[0]) :]
        g, n = self.scaled(op, dy, args), _length(op, ctx)
        squares, inner = given or ((x * x).sum(-1), (g * x).sum(-1))
        r = _rsqrt(op, squares / n)
        dx = r * g - x * r**3 * inner[..., None] / n
        own = [dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(0)][: 1 + self.vectors(op)]
        return own + [np.zeros_like(x)] * (_STEPPED if op.flag("steps") else 0)


class LayerNorm(NormBase):
    """(x - mean) / std * scale + bias (arXiv 1607.06450), 7 FLOPs per element; 4 if it is given the
    sums over the rows of x and x*x.

    `affine = scale` leaves the bias out, `affine = none` both: 1 FLOP less for each.
    """

    name = "stg.layernorm"
    params = (*_NORM_PARAMS, _CODE)
    traits = (Fusible(rows=True), Wide())
    operands = ("x", "scale, bias and sums*")
    full = 2
    sums = 2
    costs = (7, 4)
    example = "%n = stg.layernorm(%h, %g, %b) : bf16[B, S, D]"

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"layernorm": self._unfused}

    def _unfused(self, b: Builder, op: Operation, on_rank: LocalSize) -> Sequence[Value] | None:
        """In fp32 and cast back: by one kernel as `OlmoLayerNorm` of transformers, or with the
        centered input twice as `CohereLayerNorm`, whose scale is applied in fp32."""
        if op.text("code", _CODE.default) == "kernel":
            return None
        x, vectors = op.operands[0], [cast_to(b, v, "f32") for v in op.operands[1:]]
        wide, dtype, name = cast_to(b, x, "f32"), x.tensor.dtype, op.result.name
        if op.text("code") == "wide":
            given = {n: v for n, v in op.attrs.items() if n != _CODE.name}
            return [cast_to(b, b.value(self.name, [wide, *vectors], given, hint=name), dtype)]
        row = letters(x.tensor.rank)
        rows = {"spec": Quoted(f"{row},{row[:-1]}->{row}")}
        share, eps = ONE / x.tensor.shape[-1], op.expr("eps") if "eps" in op.attrs else None

        def mean(of: Value, hint: str) -> Value:
            part = b.value("stg.sum", [of], {"spec": Quoted(f"{row}->{row[:-1]}")}, hint=hint)
            return b.value("stg.scale", [part], {"by": share}, hint=hint)

        less = b.value("stg.scale", [mean(wide, f"{name}_mean")], {"by": -ONE}, hint=f"{name}_less")
        first = b.value("stg.add", [wide, less], rows, hint=f"{name}_off")
        squares = b.value("stg.power", [first], {"exponent": const(2)}, hint=f"{name}_squares")
        variance = mean(squares, f"{name}_variance")
        least = b.value("stg.constant", attrs={"value": eps or ONE / 100000}, hint=f"{name}_eps")
        spec = {"spec": Quoted(f"{row[:-1]},->{row[:-1]}")}
        variance = b.value("stg.add", [variance, least], spec, hint=variance.name)
        root = b.value("stg.power", [variance], {"exponent": -ONE / 2}, hint=f"{name}_root")
        again = b.value("stg.add", [wide, less], rows, hint=f"{name}_off")
        y = b.value("stg.einsum", [again, root], rows, hint=f"{name}_hat")
        for w in vectors[:1]:
            given = {"spec": Quoted(f"{row},{row[-1:]}->{row}")}
            y = b.value("stg.einsum", [y, w], given, hint=f"{name}_wide")
        return [cast_to(b, y, dtype)]

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        x = op.operands[0]
        sums = [_sum(b, x, f"{x.name}_sum"), _dot(b, x, x, f"{x.name}_squares")]
        return _together(b, sums, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, given = args[0], args[len(self.sides(op)[0]) :]
        xhat, _ = _standardize(op, x, given, _length(op, ctx))
        y = self.scaled(op, xhat, args)
        return [y + args[2] if self.vectors(op) == 2 else y]


class LayerNormGrad(WithVectors):
    """Gradient of `stg.layernorm` with respect to x, scale and bias, 14 FLOPs per element; 6 if it
    is given the sums over the rows of x, x*x, dy*scale and dy*scale*x. 1 less without a bias, 3
    less without a scale."""

    name = "stg.layernorm_grad"
    operands = ("dy", "x", "scale and sums*")
    results = ("dx", "dscale?", "dbias?")
    full = 2
    sums = 4
    sums_up = True
    costs = (14, 6)
    example = "%dx, %dg, %db = stg.layernorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D], bf16[D])"

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, x = op.operands[:2]
        dn = self.weighted(b, op, dy)
        sums = [_sum(b, x, f"{x.name}_sum"), _dot(b, x, x, f"{x.name}_squares")]
        sums += [_sum(b, dn, f"{dn.name}_sum"), _dot(b, dn, x, f"{dn.name}_{x.name}")]
        return _together(b, sums, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x = args[:2]
        given = args[len(self.sides(op)[0]) :]
        g, n = self.scaled(op, dy, args), _length(op, ctx)
        xhat, r = _standardize(op, x, given[:2], n)
        first, inner = given[2:] or (g.sum(-1), (g * x).sum(-1))
        mean = (given[0] if given else x.sum(-1)) / n
        along = (inner - mean * first)[..., None] * r / n  # the mean of g * xhat
        dx = r * (g - first[..., None] / n - xhat * along)
        flat = (-1, x.shape[-1])
        sums = [(dy * xhat).reshape(flat).sum(0), dy.reshape(flat).sum(0)]
        return [dx, *sums[: self.vectors(op)]]


def _standardize(op: Operation, x: Array, given: Sequence[Array], n: int) -> tuple[Array, Array]:
    """(x - mean) / std, and 1/std, of rows of n elements with these sums of x and x*x."""
    total, squares = given or (x.sum(-1), (x * x).sum(-1))
    mean = total / n
    r = _rsqrt(op, squares / n - mean * mean)
    return (x - mean[..., None]) * r, r


class Softmax(RowOp):
    """softmax(x / sqrt(rsqrt)) over the last dimension, 5 FLOPs per element; 3 if it is given the
    maximum of each row and the sum of its exponentials.

    `causal` masks what lies after the position in the dimension before the last, as the fused
    scale-mask-softmax kernels do, `window` what is so far from it; masked elements are computed and
    stored. The last dimension is whole then: it is the sequence, whose splits are context
    parallelism.
    """

    name = "stg.softmax"
    traits = (Fusible(rows=True), Wide())
    operands = ("x", "statistics*")
    params = (
        Param("causal", "flag", "mask the future"),
        Param("window", "size", "a row sees so many columns, up to its own position"),
        Param("rsqrt", "size", "scale by 1/sqrt of this"),
        PAST,
        AHEAD,
    )
    sums = 2
    costs = (5, 3)
    example = "%p = stg.softmax[causal, rsqrt = K](%scores) : bf16[B, H, S, S]"

    def rule(self, op: Operation) -> Rule:
        rule = super().rule(op)
        return replace(rule, whole=rule.special, special=frozenset()) if _is_masked(op) else rule

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if _is_masked(op) and self.given(op):
            yield "takes no statistics if it is masked: it computes them itself"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        if not _is_masked(op):
            return super().serve(step, op)
        op.attrs |= step.past_attr()
        return op.results

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        (x,) = op.operands
        row = letters(x.tensor.rank)
        spec = Quoted(f"{row}->{row[:-1]}")
        mine = b.value("stg.max", [x], {"spec": spec, "to": "f32"}, hint=f"{x.name}_top")
        (top,) = _together(b, [mine], over, "max")
        part = b.value("stg.sum_exp", [x, top], op.attrs, hint=f"{x.name}_exp")
        return [top, *_together(b, [part], over)]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        self.plain(op)
        return gradients(b, op, [*grads, op.result])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, *given = args
        seen = None
        if given:
            top, total = (v[..., None] for v in given)
            return [np.exp((x - top) * rsqrt_scale(op, ctx)) / total]
        if _is_masked(op):
            rows, columns = op.operands[0].tensor.dims[-2:]
            past = ctx.size(past_of(op))
            first = ctx.size(first_key(op, rows.size, columns.size))
            at, of = (ctx.positions(d) for d in (rows, columns))
            before, after = [p + past for p in at], [p + first for p in of]
            seen = visible(before, after) if op.flag("causal") else np.True_
            if "window" in op.attrs:
                apart = np.asarray(before)[:, None] - np.asarray(after)[None, :]
                seen = seen & (abs(apart) < ctx.size(op.expr("window")))
        return [softmax(x * rsqrt_scale(op, ctx), seen)]


def _is_masked(op: Operation) -> bool:
    return op.flag("causal") or "window" in op.attrs


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
