"""Optimizer updates of parameters, element by element (AdamW as one kernel or as several), and the
ops of gradient-norm clipping."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule
from stagec.ir.traits import AddsToSum, Fusible, InPlace, Stays, Trait
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.base import Elementwise, pointwise
from stagec.ir_spec.ops.structure import ratio

_HYPER = (
    Param("lr", "ratio", "learning rate"),
    Param("beta1", "ratio", "decay of the first moment"),
    Param("beta2", "ratio", "decay of the second moment"),
    Param("decay", "ratio", "weight decay"),
    Param("eps", "ratio", "added to the root of the second moment"),
)


class AccumulateGrad(Elementwise):
    """The kernel that adds the gradient of a microbatch to the sum of the earlier ones: 1 FLOP per
    element. It reads the gradient and the sum, and writes the sum, of element type `to`. With
    `cast`, a kernel before it casts the gradient to that type, which is written and read once more.

    The enclosing `stg.accumulate` computes the sum, so the value of this op is that of a cast. The
    first microbatch adds to zeros. Partial sums stay partial: they are reduced in the type `to`.
    """

    name = "stg.accumulate_grad"
    operands = ("grad",)
    traits = (AddsToSum(), Fusible(), Stays())
    linear = True
    params = (
        Param("to", "name", "the element type of the sum", required=True, positional=True),
        Param("cast", "flag", "a separate kernel casts the gradient"),
    )
    example = "%s = stg.accumulate_grad[f32](%g) : f32[D]"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to")]

    def bytes_touched(self, op: Operation) -> Expr:
        times = 3 if op.flag("cast") else 1
        return super().bytes_touched(op) + op.result.tensor.local_bytes * times

    def verify(self, op: Operation) -> Iterator[str]:
        if op.text("to") not in FLOATS:
            yield f"expects a floating-point type, found {op.text('to')}"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class Update(OpDef):
    """Base of the ops that update a parameter in place, element by element.

    Operands: the parameter, its gradient and the `states`; with the flag `master` the master copy,
    from which the parameter is rounded; with the flag `clip` a scalar that scales the gradient.
    """

    states: ClassVar[tuple[str, ...]] = ()
    operands: ClassVar[tuple[str, ...]] = ("param", "grad", "state, master or clip*")
    results: ClassVar[tuple[str, ...]] = ("param", "state or master*")
    traits: ClassVar[tuple[Trait, ...]] = (InPlace(operands=(0, 2, 3, 4)),)
    params: ClassVar[tuple[Param, ...]] = (
        Param("master", "flag", "there is a master copy"),
        Param("clip", "flag", "the last operand scales the gradient"),
        *_HYPER,
    )

    def state_count(self, op: Operation) -> int:
        """The number of operands that keep state, the master copy included."""
        return len(self.states) + op.flag("master")

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, 1 + self.state_count(op), scalars=op.flag("clip"))

    def verify(self, op: Operation) -> Iterator[str]:
        expected = 2 + self.state_count(op) + op.flag("clip")
        if len(op.operands) != expected:
            yield f"expects {expected} operands, found {len(op.operands)}"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[i].tensor.dtype for i in (0, *range(2, 2 + self.state_count(op)))]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        end = 2 + self.state_count(op) - op.flag("master")
        grad = args[1] * args[-1] if op.flag("clip") else args[1]
        new, *states = self.updated(op, args[end if op.flag("master") else 0], grad, args[2:end])
        return [new, *states, new] if op.flag("master") else [new, *states]

    def updated(
        self, op: Operation, old: Array, grad: Array, states: Sequence[Array]
    ) -> Sequence[Array]:
        """The parameter and its states after the first step.

        `old` is the master copy if there is one, else the parameter; `grad` is already scaled.
        """
        raise NotImplementedError


class AdamW(Update):
    """One AdamW step (arXiv 1711.05101) in place, in one kernel; 16 FLOPs per element.

    Operands: the parameter, its gradient, the first and the second moment; with the flag `master`
    the master copy, from which the parameter is rounded; with the flag `clip` a scalar that scales
    the gradient.
    """

    name = "stg.adamw"
    states = ("m", "v")
    operands = ("param", "grad", *states, "master or clip*")
    results = ("param", *states, "master?")
    flops_per_point = 16
    example = "%w2, %m2, %v2 = stg.adamw[clip](%w, %g, %m, %v, %clip) : (f32[D], f32[D], f32[D])"

    def updated(
        self, op: Operation, old: Array, grad: Array, states: Sequence[Array]
    ) -> Sequence[Array]:
        m, v = moments(op, grad, *states)
        return [adam_step(op, old, m, v), m, v]


def moments(op: Operation, grad: Array, m: Array, v: Array) -> tuple[Array, Array]:
    """The first and the second moment of Adam, updated with a gradient."""
    b1, b2 = ratio(op, "beta1", 0.9), ratio(op, "beta2", 0.95)
    return b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad * grad


def adam_step(op: Operation, old: Array, m: Array, v: Array) -> Array:
    """The parameter after the first step of AdamW (arXiv 1711.05101, algorithm 2, t = 1)."""
    b1, b2 = ratio(op, "beta1", 0.9), ratio(op, "beta2", 0.95)
    step = (m / (1 - b1)) / (np.sqrt(np.abs(v) / (1 - b2)) + ratio(op, "eps", 1e-8))
    return decayed(op, old) - ratio(op, "lr", 3e-4) * step


def decayed(op: Operation, old: Array) -> Array:
    """The parameter after decoupled weight decay."""
    return old * (1 - ratio(op, "lr", 3e-4) * ratio(op, "decay", 0.1))


class Sgd(Update):
    """One step of stochastic gradient descent in place, as `torch.optim.SGD`. With the flag
    `momentum`, the momentum m becomes `beta1` m + g (`beta1` is 9/10 by default) and is used
    instead of the gradient g. 4 FLOPs per element, 2 without momentum."""

    name = "stg.sgd"
    operands = ("param", "grad", "momentum, master or clip*")
    params = (*Update.params, Param("momentum", "flag", "the third operand is the momentum"))
    example = "%w2, %m2 = stg.sgd[momentum](%w, %g, %m) : (f32[D], f32[D])"

    def state_count(self, op: Operation) -> int:
        return op.flag("momentum") + op.flag("master")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        each = 4 if op.flag("momentum") else 2
        return product(n[f] for f in self.rule(op).factors) * each

    def updated(
        self, op: Operation, old: Array, grad: Array, states: Sequence[Array]
    ) -> Sequence[Array]:
        m = [ratio(op, "beta1", 0.9) * state + grad for state in states]
        return [old - ratio(op, "lr", 3e-4) * (m[0] if m else grad), *m]


class Lion(Update):
    """One step of Lion (arXiv 2302.06675) in place: the parameter moves by the sign of a weighted
    mean of momentum and gradient. 9 FLOPs per element."""

    name = "stg.lion"
    states = ("m",)
    operands = ("param", "grad", "m", "master or clip*")
    results = ("param", "m", "master?")
    flops_per_point = 9
    example = "%w2, %m2 = stg.lion(%w, %g, %m) : (f32[D], f32[D])"

    def updated(
        self, op: Operation, old: Array, grad: Array, states: Sequence[Array]
    ) -> Sequence[Array]:
        (m,) = states
        b1, b2 = ratio(op, "beta1", 0.9), ratio(op, "beta2", 0.99)
        step = np.sign(b1 * m + (1 - b1) * grad)
        return [decayed(op, old) - ratio(op, "lr", 3e-4) * step, b2 * m + (1 - b2) * grad]


# -- AdamW as several kernels, as in torch/optim/adam.py without `fused` ---------------------------


class AdamMoments(OpDef):
    """Updates the moments of Adam with a gradient, in place, by three kernels (lerp, mul, addcmul):
    7 FLOPs per element. The gradient is read twice, the second moment read and written twice."""

    name = "stg.adam_moments"
    operands = ("grad", "m", "v", "clip?")
    results = ("m", "v")
    element_types = ("m", "v")
    traits = (InPlace(operands=(1, 2)),)
    params = _HYPER
    flops_per_point = 7
    example = "%m2, %v2 = stg.adam_moments(%g, %m, %v) : (f32[D], f32[D])"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, 2, scalars=len(op.operands) - 3)

    def bytes_touched(self, op: Operation) -> Expr:
        grad, _, v = (value.tensor.local_bytes for value in op.operands[:3])
        return super().bytes_touched(op) + grad + v * 2

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        grad, m, v, *clip = args
        return moments(op, grad * clip[0] if clip else grad, m, v)


class AdamRoot(Elementwise):
    """The square root of the second moment, in a new buffer: 1 FLOP per element."""

    name = "stg.adam_root"
    operands = ("v",)
    traits = ()
    example = "%r = stg.adam_root(%v) : f32[D]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.sqrt(np.abs(args[0]))]


class AdamDenominator(Elementwise):
    """The divisor of the first moment: the root of the second moment over its bias correction, plus
    eps, by two kernels; 2 FLOPs per element. With `in_place` it takes the buffer of the root."""

    name = "stg.adam_denominator"
    operands = ("root",)
    traits = ()
    flops_per_point = 2
    params = (Param("in_place", "flag", "the result takes the buffer of the root"), *_HYPER)
    example = "%d = stg.adam_denominator(%r) : f32[D]"

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.flag("in_place") else None

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes * 4

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] / np.sqrt(1 - ratio(op, "beta2", 0.95)) + ratio(op, "eps", 1e-8)]


class AdamApply(OpDef):
    """Updates a parameter in place with the first moment and the denominator, by two kernels (mul,
    addcdiv): 4 FLOPs per element. With a master copy the kernels update that copy, and the
    parameter is rounded from it."""

    name = "stg.adam_apply"
    operands = ("param", "m", "denominator", "master?")
    results = ("param", "master?")
    element_types = ("param", "master")
    traits = (InPlace(operands=(0, 3)),)
    params = _HYPER
    flops_per_point = 4
    example = "%w2 = stg.adam_apply(%w, %m, %d) : f32[D]"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, len(op.operands) - 2)

    def bytes_touched(self, op: Operation) -> Expr:
        param, m, denominator, *master = (v.tensor.local_bytes for v in op.operands)
        return (master[0] if master else param) * 4 + m + denominator + (param if master else 0)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        param, m, denominator, *master = args
        step = m / (1 - ratio(op, "beta1", 0.9)) / denominator
        new = decayed(op, master[0] if master else param) - ratio(op, "lr", 3e-4) * step
        return [new] * (1 + len(master))


class ApplyUpdate(OpDef):
    """Replaces a parameter w by (1 - lr * decay) w - lr * update, in place: 4 FLOPs per element. An
    optional last operand gives the old w: with the flag `master` it is the master copy, which is
    updated too, otherwise a copy of the parameter in another type."""

    name = "stg.apply_update"
    operands = ("param", "update", "source?")
    results = ("param", "master?")
    element_types = ("param", "source")
    traits = (InPlace(operands=(0, 2)),)
    params = (Param("master", "flag", "there is a master copy"), *_HYPER)
    flops_per_point = 4
    example = "%w2 = stg.apply_update(%w, %u) : f32[D]"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, 1 + op.flag("master"))

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        param, update, *source = args
        new = decayed(op, source[0] if source else param) - ratio(op, "lr", 3e-4) * update
        return [new] * (1 + op.flag("master"))


class SquaredNorm(OpDef):
    """Sum of squares in fp32, 2 FLOPs per element; over a split dimension the result is a partial
    sum."""

    name = "stg.squared_norm"
    operands = ("x",)
    index = IndexRule("...->")
    element_types = ("f32",)
    flops_per_point = 2
    example = "%s = stg.squared_norm(%g) : f32[]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.square(args[0]).sum()]


class ClipFactor(OpDef):
    """min(1, max / sqrt(x)): the factor that clips gradients whose squared norm is x; 3 FLOPs."""

    name = "stg.clip_factor"
    operands = ("x",)
    params = (Param("max", "ratio", "the largest norm", required=True),)
    index = IndexRule("->")
    flops_per_point = 3
    example = "%c = stg.clip_factor[max = 1](%s) : f32[]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.minimum(1.0, ratio(op, "max") / np.sqrt(args[0] + 1e-12))]
