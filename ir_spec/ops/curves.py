"""The functions of activations: value, derivative and FLOPs of each.

FLOPs count each arithmetic operation, exponential, tanh and erf as one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from stagec.ir.opdef import Array
from stagec.ir.param import Param

#: The parameter of GeLU and of activations that are gated by it.
FORM = Param(
    "form",
    "name",
    "how GeLU is computed (default tanh)",
    choices=("tanh", "erf", "quick"),
    default="tanh",
)
#: A flag of GeLU and of activations that are gated by it.
STEPWISE = Param("stepwise", "flag", "model code computes it operation by operation")


@dataclass(frozen=True, slots=True)
class PointFunction:
    """An element-wise function: its value, its derivative as a function of the argument `x` or of
    the value `y` (`derived_at`), and the FLOPs per element of the function and of its gradient,
    including the product with dy."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    cost: int
    gradient_cost: int
    derived_at: str = "x"


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), element-wise."""
    return 1 / (1 + np.exp(-x))


def silu_derivative(x: Array) -> Array:
    """d silu(x) / dx, element-wise."""
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715
#: The root of 2 / pi and the coefficient of the cube in GeLU by tanh.
SLOPE, CUBIC = Fraction(_SLOPE).limit_denominator(10**9), Fraction(44715, 10**6)


def _tanh_form(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(_SLOPE * (x + _CUBIC * x**3)))


def _tanh_form_derivative(x: Array) -> Array:
    t = np.tanh(_SLOPE * (x + _CUBIC * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SLOPE * (1 + 3 * _CUBIC * x * x)


def _normal(x: Array) -> Array:
    """The distribution function of the normal distribution."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return 0.5 * (1 + erf(np.asarray(x) / math.sqrt(2)))


def _erf_form_derivative(x: Array) -> Array:
    return _normal(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def soft_silu(bound: float) -> PointFunction:
    """bound * tanh(x / bound) times the sigmoid of x."""

    def derivative(x: Array) -> Array:
        t, s = np.tanh(x / bound), sigmoid(x)
        return s * (1 - t * t + bound * t * (1 - s))

    return PointFunction(lambda x: bound * np.tanh(x / bound) * sigmoid(x), derivative, 6, 12)


def swish(slope: float, cost: int, gradient_cost: int) -> PointFunction:
    """x times the sigmoid of slope * x."""
    return PointFunction(
        lambda x: x * sigmoid(slope * x), lambda x: silu_derivative(slope * x), cost, gradient_cost
    )


def clamp(least: float, most: float) -> PointFunction:
    """x within two limits, each of which may be infinite; the derivative is 1 at the limits, as in
    `torch.clamp`."""
    cost = math.isfinite(least) + math.isfinite(most)
    return PointFunction(
        lambda x: np.clip(x, least, most), lambda x: (x >= least) & (x <= most), cost, cost
    )


SILU = swish(1, 3, 7)
RELU = PointFunction(lambda x: np.maximum(x, 0), lambda y: y > 0, 1, 1, "y")
SIGMOID = PointFunction(sigmoid, lambda y: y * (1 - y), 2, 3, "y")
TANH = PointFunction(np.tanh, lambda y: 1 - y * y, 1, 3, "y")
#: The functions of GeLU by `FORM`.
GELU: Mapping[str, PointFunction] = {
    "tanh": PointFunction(_tanh_form, _tanh_form_derivative, 8, 14),
    "erf": PointFunction(lambda x: x * _normal(x), _erf_form_derivative, 5, 11),
    "quick": swish(1.702, 4, 8),
}
