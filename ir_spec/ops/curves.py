"""The functions of activations as numbers: the sigmoid, SiLU, and the three forms of GeLU.

FLOPs count each arithmetic operation, exponential, tanh and erf as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.opdef import Array
from stagec.ir.param import Param

#: The parameter of GeLU and of what is gated by it.
FORM = Param(
    "form",
    "name",
    "how GeLU is computed (default tanh)",
    choices=("tanh", "erf", "quick"),
    default="tanh",
)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), element-wise."""
    return 1 / (1 + np.exp(-x))


def silu_derivative(x: Array) -> Array:
    """d silu(x) / dx, element-wise."""
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


@dataclass(frozen=True, slots=True)
class GeluForm:
    """A form of GeLU: its value and derivative, element-wise, and the FLOPs per element of it and
    of its gradient, the product with dy included."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    cost: int
    grad_cost: int


def gelu_form(op: Operation) -> GeluForm:
    """The form of GeLU that the op states."""
    return _GELU[op.text("form", FORM.default)]


_SLOPE, _CUBIC, _QUICK = math.sqrt(2 / math.pi), 0.044715, 1.702


def _tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(_SLOPE * (x + _CUBIC * x**3)))


def _tanh_derivative(x: Array) -> Array:
    t = np.tanh(_SLOPE * (x + _CUBIC * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SLOPE * (1 + 3 * _CUBIC * x * x)


def _normal(x: Array) -> Array:
    """The distribution function of the normal distribution."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return 0.5 * (1 + erf(np.asarray(x) / math.sqrt(2)))


def _erf(x: Array) -> Array:
    return x * _normal(x)


def _erf_derivative(x: Array) -> Array:
    return _normal(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _quick(x: Array) -> Array:
    return x * sigmoid(_QUICK * x)


def _quick_derivative(x: Array) -> Array:
    return silu_derivative(_QUICK * x)


_GELU: Mapping[str, GeluForm] = {
    "tanh": GeluForm(_tanh, _tanh_derivative, 8, 14),
    "erf": GeluForm(_erf, _erf_derivative, 5, 11),
    "quick": GeluForm(_quick, _quick_derivative, 4, 8),
}
