"""Gradients of whole models against finite differences of the forward program on one device: those
of the library, and one imported from a small configuration of each family.

The forward program is the model's own text, which no pass but shape inference has touched.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from stagec.importers.registry import BUILT_IN
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.configurations import sizes_of, small
from tests.support import (
    DEEPSEEK,
    EXHAUSTIVE,
    TINY,
    TINY_CLICKS,
    inputs_of,
    run_numeric,
    run_passes,
    tiny_module,
)

STEP = 1e-5
#: All texts of the library; DeepSeek-V3 with multi-token prediction has all of the plain one.
MODELS = tuple(name for name in (*TINY, *TINY_CLICKS) if name != DEEPSEEK)
#: The first model type of each family, and those that stand for the others in `make test`.
IMPORTED = tuple((*family.model_types, *family.marks)[0] for family in BUILT_IN)
FIRST = ("gpt_oss", "jamba")
#: A bias of keys adds the same to all scores of a query where positions do not turn it; what texts
#: ask in the last layer of Stable Diffusion 3 is not used.
WITHOUT_INFLUENCE = ("/bk", *(f"/last/text_qkv/{name}" for name in ("wq", "bq", "q_norm")))
#: At their small sizes many gradients are below 1e-8: values 4 times as large as others hide the
#: rest, or scores so large that a query sees one key.
FLAT = ("bart", "plbart", "marian", "PixArtTransformer2DModel")


def shaped(model: str, pipeline: str, **options: Any) -> Module:
    """A tiny model of the library, or one of a small configuration, after the passes."""
    if model in {*TINY, *TINY_CLICKS}:
        return tiny_module(model, pipeline, **options)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}.json"
        path.write_text(json.dumps(small(model)))
        builder = JobBuilder(JobOptions(str(path), sizes=sizes_of(model, 2, 8), **options))
    return run_passes(builder.module, pipeline)


@cache
def forward(model: str) -> tuple[Module, dict[str, Array]]:
    """The shaped forward program and values for its arguments."""
    module = shaped(model, "inline,infer-shapes")
    return module, inputs_of(module, seed=1)


def loss_at(model: str, moved: dict[str, Array]) -> float:
    """The loss with some arguments replaced."""
    module, inputs = forward(model)
    return float(run_numeric(module, {**inputs, **moved})[0])


@cache
def derived(model: str, microbatches: int) -> dict[str, Array]:
    """The gradients that the differentiated program computes."""
    module, inputs = forward(model)
    step = shaped(
        model, "inline,infer-shapes,apply-strategy,differentiate", microbatches=microbatches
    )
    results = run_numeric(step, inputs)
    assert float(results[0]) == pytest.approx(loss_at(model, {}), rel=1e-12)
    return dict(zip([p.name for p in module.trainable()], results[1:], strict=True))


def slope(model: str, direction: dict[str, Array], step: float) -> float:
    """The loss's slope along a direction: the central difference of fourth order."""
    _, inputs = forward(model)
    two, one, back, far = (
        loss_at(model, {n: inputs[n] + steps * step * d for n, d in direction.items()})
        for steps in (2, 1, -1, -2)
    )
    return (8 * (one - back) - (two - far)) / (12 * step)


def random_direction(model: str, names: list[str], seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    _, inputs = forward(model)
    return {n: rng.standard_normal(inputs[n].shape) for n in names}


def assert_slope(model: str, grads: dict[str, Array], direction: dict[str, Array]) -> None:
    actual = sum(float((grads[n] * d).sum()) for n, d in direction.items())
    if actual == pytest.approx(slope(model, direction, STEP), rel=1e-6, abs=1e-9):
        return
    if actual == pytest.approx(slope(model, direction, STEP / 20), rel=1e-6, abs=1e-9):
        return  # a kink of a ReLU lay between: closer to it there is none
    # what is left is the rounding of a loss that is large
    assert actual == pytest.approx(slope(model, direction, STEP * 20), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "model", [*MODELS, *(pytest.param(m, marks=() if m in FIRST else EXHAUSTIVE) for m in IMPORTED)]
)
def test_gradient_of_each_parameter(model: str) -> None:
    grads = derived(model, 1)
    for seed, name in enumerate(grads):
        if not f"/{name}".endswith(WITHOUT_INFLUENCE) and model not in FLAT:
            assert np.abs(grads[name]).max() > 1e-8, f"{name} has no influence: a weak test"
        assert_slope(model, grads, random_direction(model, [name], seed))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_gradient_along_random_directions(model: str, microbatches: int) -> None:
    grads = derived(model, microbatches)
    for seed in range(3):
        assert_slope(model, grads, random_direction(model, list(grads), 100 + seed))
