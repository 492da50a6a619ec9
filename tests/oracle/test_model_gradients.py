"""Gradients of whole models against finite differences of the forward program on one device.

The forward program is the model's own text, which no pass but shape inference has touched.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from stagec.ir.module import Module
from stagec.ir.opdef import Array
from tests.support import DEEPSEEK, TINY, TINY_CLICKS, inputs_of, run_numeric, tiny_module

STEP = 1e-5
#: All texts of the library; DeepSeek-V3 with multi-token prediction has all of the plain one.
MODELS = tuple(name for name in (*TINY, *TINY_CLICKS) if name != DEEPSEEK)


@cache
def forward(model: str) -> tuple[Module, dict[str, Array]]:
    """The shaped forward program and values for its arguments."""
    module = tiny_module(model, "inline,infer-shapes")
    return module, inputs_of(module, seed=1)


def loss_at(model: str, moved: dict[str, Array]) -> float:
    """The loss with some arguments replaced."""
    module, inputs = forward(model)
    return float(run_numeric(module, {**inputs, **moved})[0])


@cache
def derived(model: str, microbatches: int) -> dict[str, Array]:
    """The gradients that the differentiated program computes."""
    module, inputs = forward(model)
    step = tiny_module(
        model, "inline,infer-shapes,apply-strategy,differentiate", microbatches=microbatches
    )
    results = run_numeric(step, inputs)
    assert float(results[0]) == pytest.approx(loss_at(model, {}), rel=1e-12)
    return dict(zip([p.name for p in module.parameters()], results[1:], strict=True))


def slope(model: str, direction: dict[str, Array]) -> float:
    """The loss's slope along a direction: the central difference of fourth order."""
    _, inputs = forward(model)
    two, one, back, far = (
        loss_at(model, {n: inputs[n] + steps * STEP * d for n, d in direction.items()})
        for steps in (2, 1, -1, -2)
    )
    return (8 * (one - back) - (two - far)) / (12 * STEP)


def random_direction(model: str, names: list[str], seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    _, inputs = forward(model)
    return {n: rng.standard_normal(inputs[n].shape) for n in names}


def assert_slope(model: str, grads: dict[str, Array], direction: dict[str, Array]) -> None:
    expected = slope(model, direction)
    found = sum(float((grads[n] * d).sum()) for n, d in direction.items())
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("model", MODELS)
def test_gradient_of_each_parameter(model: str) -> None:
    grads = derived(model, 1)
    for seed, name in enumerate(grads):
        assert np.abs(grads[name]).max() > 1e-6, f"{name} has no influence: a weak test"
        assert_slope(model, grads, random_direction(model, [name], seed))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_gradient_along_random_directions(model: str, microbatches: int) -> None:
    grads = derived(model, microbatches)
    for seed in range(3):
        assert_slope(model, grads, random_direction(model, list(grads), 100 + seed))
