"""Normalisation over the last dimension: rmsnorm, layernorm, and their gradients.

The gradients recompute the row statistics from the input, so only the input is stashed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, const
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters
from stagec.ir.traits import Fusible, Wide
from stagec.ir_spec.ops.base import gradients, stated
from stagec.ir_spec.ops.contraction import cast_to
from stagec.ir_spec.ops.rows import Axes, RowOp, all_reduced, row_dot, row_length, row_sum
from stagec.ir_spec.ops.structure import ratio

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
    "how model code computes it: by a kernel (the default), by one in fp32 (wide), by one in the "
    "type to which autocast casts (narrow), or operation by operation in fp32 (stepwise)",
    choices=("kernel", "wide", "narrow", "stepwise"),
    default="kernel",
)
#: The value of `code` of a norm that casts as products do.
NARROW = "narrow"
_STEPS = Param("steps", "flag", "backward runs operation by operation, as that of eager PyTorch")
_IN_PLACE = Param("in_place", "flag", "the gradient of x overwrites that of the result")
#: The number of temporary tensors of eager backward: x^(2-1), 2x of it, and the mean's gradient for
#: each element (`pow_backward` and `mean_backward` of derivatives.yaml).
_STEPPED = 3


class WithVectors(RowOp):
    """Base class of norms and their gradients. `full` is the largest number of vectors of a norm: a
    scale, then a bias; a scale of two dimensions has a row for each head. `sums_up` means that the
    op is a gradient, which also computes those of the vectors."""

    params: ClassVar[tuple[Param, ...]] = _NORM_PARAMS
    full: ClassVar[int] = 1
    sums_up: ClassVar[bool] = False

    def vectors(self, op: Operation) -> int:
        """The number of vectors of the norm."""
        return {"full": self.full, "scale": 1, "none": 0}[op.text("affine")]

    def scale(self, op: Operation) -> Value | None:
        """The vector w, or None."""
        return op.operands[2 if self.sums_up else 1] if self.vectors(op) else None

    def vector_rank(self, op: Operation) -> int:
        scale = self.scale(op)
        return 1 if scale is None else scale.tensor.rank

    def scale_letters(self, op: Operation) -> str:
        """The letters of the scale, the last of those of x."""
        return letters(op.operands[0].tensor.rank)[-self.vector_rank(op) :]

    def sides(self, op: Operation) -> tuple[str, str]:
        count = self.vectors(op)
        if self.sums_up:
            return "xx" + "w" * min(count, 1), "x" + "w" * count
        return "x" + "w" * count, "x"

    def saved(self, op: Operation) -> int:
        """The FLOPs per element that a norm without a bias saves (1), and without a scale (1, in a
        gradient 3)."""
        count = self.vectors(op)
        scale = 0 if count else 3 if self.sums_up else 1
        return scale + (1 if self.full == 2 and count < 2 else 0)

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("zero_centered") and not self.vectors(op):
            yield "expects a scale with 'zero_centered'"

    def rule(self, op: Operation) -> Rule:
        least = len(self.sides(op)[0])
        if len(op.operands) not in (least, least + self.sums):
            raise op.error(
                f"'{op.name}' expects {least} operands with affine = {op.text('affine')}, or "
                f"{self.sums} more for the statistics of rows, found {len(op.operands)}",
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
        spec = {"spec": f"{row},{self.scale_letters(op)}->{row}"}
        y = b.value("stg.einsum", [x, w], spec, hint=hint)
        return b.value("stg.add", [x, y], hint=hint) if op.flag("zero_centered") else y

    def scaled(self, op: Operation, x: Array, args: Sequence[Array]) -> Array:
        """x times the scale, for the numeric reference."""
        if not self.vectors(op):
            return x
        w = args[2 if self.sums_up else 1]
        return x * (1 + w if op.flag("zero_centered") else w)


class NormBase(WithVectors):
    """Base class of norms, whose gradient op is `<name>_grad`."""

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        given = [*grads, *self.plain(op)[: 1 + min(self.vectors(op), 1)]]
        return gradients(b, op, given)[: len(op.operands)]


class RmsNorm(NormBase):
    """x / rms(x) * scale (arXiv 1910.07467), 4 FLOPs per element; 2 with the sums of the squares of
    rows as operand.

    With `affine = none` it has no scale, and 1 FLOP less. The scale may have a row for each head.
    """

    name = "stg.rmsnorm"
    params = (*_NORM_PARAMS, _WIDE_SCALE, _GIVEN_INPUT, _STEPS, _IN_PLACE)
    operands = ("x", "scale and squares*")
    costs = (4, 2)
    example = "%n = stg.rmsnorm(%h, %g) : bf16[B, S, D]"

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"rmsnorm": self._unfused, "norm_in_place": self._in_place}

    def _in_place(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """liger_kernel/ops/rms_norm.py: `rms_norm_backward` with `in_place`, the default, where
        `dX = dY`."""
        op.attrs["in_place"] = True
        return None

    def _unfused(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value]:
        """In fp32, cast back and scaled, as `LlamaRMSNorm` of transformers; a zero-centered scale
        is applied in fp32, as in `Gemma3RMSNorm`, and so is a wide one, as in `Olmo2RMSNorm`. With
        `given_input`, x is multiplied in its own type, as in `T5LayerNorm`."""
        x, w = op.operands[0], self.scale(op)
        dtype, name = x.tensor.dtype, op.result.name
        row, wide = letters(x.tensor.rank), cast_to(b, x, "f32")
        of_scale = self.scale_letters(op)
        if op.flag(_GIVEN_INPUT.name) and w is not None:
            rows = {"spec": f"{row},{row[:-1]}->{row}"}
            root = _root_of_squares(b, op, wide, f"{name}_sum", f"{name}_mean")
            root = cast_to(b, root, dtype)
            y = b.value("stg.einsum", [x, root], rows, hint=f"{name}_hat")
            rows = {"spec": f"{row},{of_scale}->{row}"}
            return [b.value("stg.einsum", [y, w], rows, hint=name)]
        in_wide = op.flag("zero_centered") or op.flag("wide_scale")
        plain: dict[str, RawAttr] = {"affine": "none", "steps": True, **stated(op, [_EPS])}
        plain |= {"wide_scale": True} if in_wide and w is not None else {}
        y = b.value(self.name, [wide], plain, hint=f"{name}_hat")
        if w is None:
            return [cast_to(b, y, dtype)]
        w, y = (cast_to(b, w, "f32"), y) if in_wide else (w, cast_to(b, y, dtype))
        if op.flag("zero_centered"):
            one = b.value("stg.constant", attrs={"value": 1}, hint=f"{name}_one")
            spec = {"spec": f"{of_scale},->{of_scale}"}
            w = b.value("stg.add", [w, one], spec, hint=f"{name}_scale")
        spec = {"spec": f"{row},{of_scale}->{row}"}
        y = b.value("stg.einsum", [y, w], spec, hint=f"{name}_wide" if in_wide else name)
        return [cast_to(b, y, dtype)]

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        x = op.operands[0]
        return all_reduced(b, [row_dot(b, x, x, f"{x.name}_squares")], over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, given = args[0], args[len(self.sides(op)[0]) :]
        squares = given[0] if given else (x * x).sum(-1)
        return [self.scaled(op, x * _rsqrt(op, squares / row_length(op, ctx)), args)]


def _mean(b: Builder, x: Value, total: str, mean: str) -> Value:
    """The mean of each row; `total` and `mean` are the names of the sum and the mean."""
    row = letters(x.tensor.rank)
    added = b.value("stg.sum", [x], {"spec": f"{row}->{row[:-1]}"}, hint=total)
    return b.value("stg.scale", [added], {"by": ONE / x.tensor.shape[-1]}, hint=mean)


def _root_of_squares(b: Builder, op: Operation, x: Value, total: str, mean: str) -> Value:
    """1/sqrt of the mean square of each row and `eps`; `total` and `mean` are names."""
    name, rows = op.result.name, letters(x.tensor.rank - 1)
    squares = b.value("stg.power", [x], {"exponent": const(2)}, hint=f"{name}_squares")
    square = _mean(b, squares, total, mean)
    eps = op.expr("eps", ONE / 100000)
    least = b.value("stg.constant", attrs={"value": eps}, hint=f"{name}_eps")
    square = b.value("stg.add", [square, least], {"spec": f"{rows},->{rows}"}, hint=square.name)
    return b.value("stg.power", [square], {"exponent": -ONE / 2}, hint=f"{name}_root")


def _rsqrt(op: Operation, x: Array) -> Array:
    """1/sqrt of a statistic of rows, for each of their elements."""
    return (1 / np.sqrt(x + ratio(op, "eps", 1e-5)))[..., None]


def _summed(x: Array, scale: Sequence[Array]) -> Array:
    """The sum of x over the dimensions that the scale does not have, or over rows without one."""
    return x.sum(tuple(range(x.ndim - (scale[0].ndim if scale else 1))))


class RmsNormGrad(WithVectors):
    """Gradient of `stg.rmsnorm` with respect to x and scale, 11 FLOPs per element; 6 with the sums
    over rows of x*x and dy*scale*x as operands. 3 less without a scale.

    With `steps`, the last results are temporary buffers of the size of x, for gradients of the
    square and of the mean. With `in_place`, dx overwrites dy.
    """

    name = "stg.rmsnorm_grad"
    params = (*_NORM_PARAMS, _STEPS, _IN_PLACE)
    operands = ("dy", "x", "scale and sums*")
    results = ("dx", "dscale and buffers*")
    sums = 2
    sums_up = True
    costs = (11, 6)
    example = "%dx, %dg = stg.rmsnorm_grad(%dn, %h, %g) : (bf16[B, S, D], bf16[D])"

    def sides(self, op: Operation) -> tuple[str, str]:
        left, right = super().sides(op)
        return left, right + "x" * (_STEPPED if op.flag("steps") else 0)

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.flag("in_place") and not result else None

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        dy, x = op.operands[:2]
        dn = self.weighted(b, op, dy)
        dots = [row_dot(b, x, x, f"{x.name}_squares"), row_dot(b, dn, x, f"{dn.name}_{x.name}")]
        return all_reduced(b, dots, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x = args[:2]
        given = args[len(self.sides(op)[0]) :]
        g, n = self.scaled(op, dy, args), row_length(op, ctx)
        squares, inner = given or ((x * x).sum(-1), (g * x).sum(-1))
        r = _rsqrt(op, squares / n)
        dx = r * g - x * r**3 * inner[..., None] / n
        own = [dx, _summed(dy * x * r, args[2:3])][: 1 + self.vectors(op)]
        return own + [np.zeros_like(x)] * (_STEPPED if op.flag("steps") else 0)


class LayerNorm(NormBase):
    """(x - mean) / std * scale + bias (arXiv 1607.06450), 7 FLOPs per element; 4 with the sums over
    rows of x and x*x as operands.

    With `affine = scale` it has no bias, with `affine = none` neither: 1 FLOP less for each. The
    scale may have a row for each head.
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

    def _unfused(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """In fp32 and cast back: by one kernel as `OlmoLayerNorm` of transformers, or with the
        centered input twice as `CohereLayerNorm`, whose scale is applied in fp32."""
        if op.text("code", _CODE.default) in ("kernel", NARROW):
            return None
        x, vectors = op.operands[0], [cast_to(b, v, "f32") for v in op.operands[1:]]
        wide, dtype, name = cast_to(b, x, "f32"), x.tensor.dtype, op.result.name
        if op.text("code") == "wide":
            given = {n: v for n, v in op.attrs.items() if n != _CODE.name}
            return [cast_to(b, b.value(self.name, [wide, *vectors], given, hint=name), dtype)]
        row = letters(x.tensor.rank)
        rows = {"spec": f"{row},{row[:-1]}->{row}"}
        mean = _mean(b, wide, f"{name}_mean", f"{name}_mean")
        less = b.value("stg.scale", [mean], {"by": -ONE}, hint=f"{name}_less")
        first = b.value("stg.add", [wide, less], rows, hint=f"{name}_off")
        root = _root_of_squares(b, op, first, f"{name}_variance", f"{name}_variance")
        again = b.value("stg.add", [wide, less], rows, hint=f"{name}_off")
        y = b.value("stg.einsum", [again, root], rows, hint=f"{name}_hat")
        for w in vectors[:1]:
            given = {"spec": f"{row},{self.scale_letters(op)}->{row}"}
            y = b.value("stg.einsum", [y, w], given, hint=f"{name}_wide")
        return [cast_to(b, y, dtype)]

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        x = op.operands[0]
        sums = [row_sum(b, x, f"{x.name}_sum"), row_dot(b, x, x, f"{x.name}_squares")]
        return all_reduced(b, sums, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, given = args[0], args[len(self.sides(op)[0]) :]
        xhat, _ = _standardize(op, x, given, row_length(op, ctx))
        y = self.scaled(op, xhat, args)
        return [y + args[2] if self.vectors(op) == 2 else y]


class LayerNormGrad(WithVectors):
    """Gradient of `stg.layernorm` with respect to x, scale and bias, 14 FLOPs per element; 6 with
    the sums over rows of x, x*x, dy*scale and dy*scale*x as operands. 1 less without a bias, 3 less
    without a scale."""

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
        sums = [row_sum(b, x, f"{x.name}_sum"), row_dot(b, x, x, f"{x.name}_squares")]
        sums += [row_sum(b, dn, f"{dn.name}_sum"), row_dot(b, dn, x, f"{dn.name}_{x.name}")]
        return all_reduced(b, sums, over)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x = args[:2]
        given = args[len(self.sides(op)[0]) :]
        g, n = self.scaled(op, dy, args), row_length(op, ctx)
        xhat, r = _standardize(op, x, given[:2], n)
        first, inner = given[2:] or (g.sum(-1), (g * x).sum(-1))
        mean = (given[0] if given else x.sum(-1)) / n
        along = (inner - mean * first)[..., None] * r / n  # the mean of g * xhat
        dx = r * (g - first[..., None] / n - xhat * along)
        sums = [_summed(dy * xhat, args[2:3]), _summed(dy, args[2:3])]
        return [dx, *sums[: self.vectors(op)]]


def _standardize(op: Operation, x: Array, given: Sequence[Array], n: int) -> tuple[Array, Array]:
    """(x - mean) / std, and 1/std, of rows of n elements with these sums of x and x*x."""
    total, squares = given or (x.sum(-1), (x * x).sum(-1))
    mean = total / n
    r = _rsqrt(op, squares / n - mean * mean)
    return (x - mean[..., None]) * r, r
