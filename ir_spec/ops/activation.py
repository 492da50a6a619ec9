"""Activations and dropout, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, const, fraction
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Fusible, Wide
from stagec.ir_spec.ops.base import (
    Elementwise,
    derive,
    gradients,
    need_result,
    pointwise,
    present,
    work,
)
from stagec.ir_spec.ops.contraction import cast_to
from stagec.ir_spec.ops.curves import (
    CUBIC,
    FORM,
    GELU,
    RELU,
    SIGMOID,
    SILU,
    SLOPE,
    STEPWISE,
    TANH,
    PointFunction,
    clamp,
)


class Activation(Elementwise):
    """Base class of activations `y = f(x)`. The derived gradient takes dy, and x or y, the only
    stashed value."""

    curve: ClassVar[PointFunction]
    gradient: ClassVar[str]  # what the documentation of the gradient adds

    def curve_of(self, op: Operation) -> PointFunction:
        """The function that an operation computes."""
        return self.curve

    def gradient_base(self) -> type[ActivationGrad]:
        """The class of its gradient."""
        return ActivationGrad

    def derived(self) -> Sequence[OpDef]:
        at = self.curve.derived_at
        doc = f"Gradient of `{self.name}`{self.gradient}."
        example = f"%dx = {self.name}_grad(%dy, %{at}) : bf16[B]"
        params = tuple(p for p in self.params if p is not STEPWISE)
        given = {"of": self, "operands": ("dy", at), "params": params}
        return [derive(self.gradient_base(), self, "grad", doc, example, **given)]

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, self.curve_of(op).cost, self.rule(op))

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        stashed = op.operands[0] if self.curve.derived_at == "x" else op.result
        return gradients(b, op, [*grads, stashed])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [self.curve_of(op).value(args[0])]


class ActivationGrad(Elementwise):
    """Base class of gradients of activations."""

    of: ClassVar[Activation]

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, self.of.curve_of(op).gradient_cost, self.rule(op))

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, at = args
        return [dy * self.of.curve_of(op).derivative(at)]


class Gelu(Activation):
    """GeLU (arXiv 1606.08415): x times the normal distribution function at x.

    `form` is the approximation. FLOPs per element: tanh, the default, 8; erf, which is exact, 5;
    quick, x times the sigmoid of 1.702 x, 4. PyTorch has kernels for tanh and erf; with `stepwise`,
    a model does not use them.
    """

    name = "stg.gelu"
    params = (FORM, STEPWISE)
    curve = GELU[FORM.default]
    gradient = ". FLOPs per element: tanh 14, erf 11, quick 8"
    example = "%y = stg.gelu(%x) : bf16[B]"

    def curve_of(self, op: Operation) -> PointFunction:
        return GELU[op.text("form", FORM.default)]

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"gelu": self._unfused}

    def _unfused(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        if not op.flag("stepwise"):
            return None
        return [gelu_steps(b, op.operands[0], op.text("form", FORM.default), op.result.name)]


def gelu_steps(b: Builder, x: Value, form: str, hint: str) -> Value:
    """GeLU of x operation by operation, as in activations.py of transformers: `NewGELUActivation`
    for tanh, `QuickGELUActivation` for quick, and `GELUActivation._gelu_python` for erf, which is
    computed by its kernel."""
    name = x.name
    if form == "erf":
        return b.value("stg.gelu", [x], {"form": form}, hint=hint)
    if form == "quick":
        scaled = b.value("stg.scale", [x], {"by": const(851) / 500}, hint=f"{name}_scaled")
        share = b.value("stg.sigmoid", [scaled], hint=f"{name}_share")
        return b.value("stg.mul", [x, share], hint=hint)
    half = b.value("stg.scale", [x], {"by": const(1) / 2}, hint=f"{name}_half")
    cube = b.value("stg.power", [x], {"exponent": const(3)}, hint=f"{name}_cube")
    cube = b.value("stg.scale", [cube], {"by": _ratio(CUBIC)}, hint=cube.name)
    curve = b.value("stg.add", [x, cube], hint=f"{name}_curve")
    curve = b.value("stg.scale", [curve], {"by": _ratio(SLOPE)}, hint=curve.name)
    share = b.value("stg.tanh", [curve], hint=f"{name}_tanh")
    one = b.value("stg.constant", attrs={"value": const(1)}, hint=f"{name}_one")
    row = letters(x.tensor.rank)
    spec = {"spec": f"{row},->{row}"}
    share = b.value("stg.add", [share, cast_to(b, one, x.tensor.dtype)], spec, hint=f"{name}_share")
    return b.value("stg.mul", [half, share], hint=hint)


def _ratio(value: Fraction) -> Expr:
    return const(value.numerator) / value.denominator


class Silu(Activation):
    """SiLU, x times its sigmoid; 3 FLOPs per element."""

    name = "stg.silu"
    curve = SILU
    gradient = ", 7 FLOPs per element"
    example = "%y = stg.silu(%x) : bf16[B]"


class Relu(Activation):
    """max(x, 0), one comparison per element. Its square is `stg.mul` of the result with itself."""

    name = "stg.relu"
    curve = RELU
    gradient = ": dy where the result is positive; one comparison per element"
    example = "%y = stg.relu(%x) : bf16[B]"


class Sigmoid(Activation):
    """1 / (1 + exp(-x)), 2 FLOPs per element."""

    name = "stg.sigmoid"
    curve = SIGMOID
    gradient = ", dy * y * (1 - y): 3 FLOPs per element"
    example = "%y = stg.sigmoid(%x) : bf16[B]"


class Tanh(Activation):
    """Hyperbolic tangent, one FLOP per element. A soft cap c is c * tanh(x / c) (arXiv 2408.00118):
    between two `stg.scale`."""

    name = "stg.tanh"
    curve = TANH
    gradient = ", dy * (1 - y * y): 3 FLOPs per element"
    example = "%y = stg.tanh(%x) : bf16[B]"


class ClampGrad(ActivationGrad):
    """Base class of the gradient of `stg.clamp`. Unless a compiler fuses it, PyTorch compares x
    with each limit, combines two results of a byte each, and selects dy where both are true
    (pytorch/pytorch, torch/csrc/autograd/FunctionsManual.cpp, `clamp_backward`)."""

    def bytes_touched(self, op: Operation) -> Expr:
        if "fused" in op.attrs:
            return super().bytes_touched(op)
        dy, at = (v.tensor for v in op.operands)
        limits = len({"least", "most"} & op.attrs.keys())
        masks = dy.local_elements * (limits + 3 * (limits - 1) + 1)
        return at.local_bytes * limits + masks + dy.local_bytes * 2


class Clamp(Activation):
    """x, but at least `least` and at most `most`; one comparison per element for each."""

    name = "stg.clamp"
    params = (
        Param("least", "ratio", "the smallest value (default: no limit)"),
        Param("most", "ratio", "the largest value (default: no limit)"),
    )
    gradient = (
        ": dy where x is within the limits; one comparison per element for each. Unless it is "
        "fused, it moves the bytes of PyTorch's kernels: 8 per element of 16 bits for one limit, "
        "14 for two"
    )
    curve = clamp(-math.inf, math.inf)
    example = "%y = stg.clamp[least = -7, most = 7](%x) : bf16[B]"

    def gradient_base(self) -> type[ActivationGrad]:
        return ClampGrad

    def curve_of(self, op: Operation) -> PointFunction:
        given = {n: float(fraction(op.expr(n))) for n in ("least", "most") if n in op.attrs}
        return clamp(given.get("least", -math.inf), given.get("most", math.inf))

    def verify(self, op: Operation) -> Iterator[str]:
        limits = [n for n in ("least", "most") if n in op.attrs]
        if not limits:
            yield "expects 'least', 'most' or both"
        yield from (
            f"expects a number for '{n}', found {op.expr(n)}" for n in limits if op.expr(n).symbols
        )


class Exp(Elementwise):
    """e to the power x, one FLOP per element."""

    name = "stg.exp"
    traits = (Fusible(), Wide())
    example = "%y = stg.exp(%x) : bf16[B]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, op.result], by="stg.mul")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.exp(args[0])]


class Power(Elementwise):
    """x to a constant power, such as 1/2 for the root and -1 for the inverse; one FLOP per element.
    For negative x, only whole powers are defined."""

    name = "stg.power"
    traits = (Fusible(), Wide())
    params = (Param("exponent", "ratio", "the power", required=True),)
    example = "%y = stg.power[exponent = 1/2](%x) : bf16[B]"

    def verify(self, op: Operation) -> Iterator[str]:
        if op.expr("exponent").symbols:
            yield f"expects a number for 'exponent', found {op.expr('exponent')}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        x, p = op.operands[0], op.expr("exponent")
        slope = b.value("stg.power", [x], {"exponent": p - 1}, hint=x.prefixed("slope_"))
        turned = b.value("stg.mul", [present(grads[0]), slope], hint=x.prefixed("turned_"))
        return [b.value("stg.scale", [turned], {"by": p}, hint=x.prefixed("d_"))]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.power(args[0], float(fraction(op.expr("exponent"))))]


class Softplus(Elementwise):
    """log(1 + exp(x)), 3 FLOPs per element; minus the logarithm of the sigmoid of -x."""

    name = "stg.softplus"
    traits = (Fusible(), Wide())
    flops_per_point = 3
    example = "%y = stg.softplus(%x) : bf16[B]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        x = op.operands[0]
        slope = b.value("stg.sigmoid", [x], hint=x.prefixed("slope_"))
        return gradients(b, op, [*grads, slope], by="stg.mul")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.logaddexp(args[0], 0)]


class Dropout(Elementwise):
    """Zeroes elements with probability p and scales the rest; the second result is the 1-byte mask.

    The mask is a function of the seed, the layer and the global index, so it does not depend on
    placement.
    """

    name = "stg.dropout"
    flops_per_point = 2
    results = ("result", "mask?")
    params = (
        Param("p", "ratio", "the probability of a zero", required=True),
        Param("seed", "int", "distinguishes one dropout from another (default 0)"),
    )
    element_types = ("x", "u8")
    example = "%y, %mask = stg.dropout[p = 1/10](%x) : (bf16[B], u8[B])"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, 2)

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Inference drops nothing."""
        return [op.operands[0]]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [grads[0], need_result(op, 1, "mask")])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, p = args[0], float(fraction(op.expr("p")))
        index = np.full(
            x.shape, op.integer("seed", 0) * 7919 + ctx.iteration * 104729 + 1, dtype=np.uint64
        )
        for d, dim in enumerate(op.operands[0].tensor.dims):
            along = np.asarray(ctx.positions(dim), dtype=np.uint64)
            index = index * np.uint64(6364136223846793005) + along.reshape(
                [-1 if i == d else 1 for i in range(x.ndim)]
            )
        index ^= index >> np.uint64(31)
        index *= np.uint64(0x9E3779B97F4A7C15)
        mask = ((index >> np.uint64(11)).astype(np.float64) / 2.0**53 >= p).astype(np.uint8)
        return [x * mask / (1 - p), mask]


class DropoutGrad(Elementwise):
    """Gradient of `stg.dropout` from its mask, 2 FLOPs per element."""

    name = "stg.dropout_grad"
    flops_per_point = 2
    operands = ("dy", "mask")
    params = (Param("p", "ratio", "the probability of a zero", required=True),)
    example = "%dx = stg.dropout_grad[p = 1/10](%dy, %mask) : bf16[B]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] * args[1] / (1 - float(fraction(op.expr("p"))))]
