"""Imported encoders, towers and diffusion transformers: a step on a mesh computes what one device
computes, gradients and updates included, under strategies of every kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import EXHAUSTIVE, STEP, inputs_of, run_passes
from tests.towers import SIZES, TOWERS, tower

#: Drawn pairwise by hand: every value of each option meets every mesh.
ROWS: Sequence[Mapping[str, Any]] = (
    {"dp": 2, "tp": 2, "sp": True, "zero": 3},
    {"tp": 4, "recompute": "full"},
    {"dp": 4, "zero": 1, "microbatches": 2},
    {"dp": 2, "tp": 2, "zero": 0, "recompute": "selective", "fp8": "hybrid"},
    {"dp": 4, "zero": 3, "recompute": "full"},
    {"dp": 2, "zero": 2, "microbatches": 2, "recompute": "full"},
    {"tp": 2, "sp": True, "microbatches": 2},
    {"tp": 4, "sp": True, "fp8": "hybrid"},
)
#: Without a dimension S: sequence parallelism has none to split.
_DINO = ("dinov2", "dinov2_with_registers", "dinov3_vit")
_PATCHES = ("clip_vision_model", "siglip_vision_model", "siglip_vision_model-patches")
NO_SEQUENCE = (
    "convnext",
    "convnextv2",
    "swin",
    "swinv2",
    "swinv2-wide",
    "beit",
    "beit-shared",
    "vit",
    "deit",
    "deit-teacher",
    *_DINO,
    *_PATCHES,
)
#: A loss over all pairs of the batch: with microbatches it is another loss.
PAIRS = ("clip", "siglip")
FIRST = ("bert", "t5", "whisper", "clip", "FluxTransformer2DModel")


@cache
def path(name: str) -> str:
    """The file of a configuration."""
    file = Path(mkdtemp()) / f"{name.lower()}.json"
    file.write_text(json.dumps(tower(name)))
    return str(file)


def module(name: str, passes: str, **options: Any) -> Module:
    sizes = {"B": 8, **SIZES.get(name, {})}
    builder = JobBuilder(JobOptions(path(name), sizes=sizes, **options))
    return run_passes(builder.module, passes)


@cache
def plain(name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and results of the step on one device."""
    actual = module(name, STEP)
    inputs = inputs_of(actual, 2)
    return inputs, run_named(actual, actual.env, inputs)


CASES = [
    pytest.param(
        name, row, id=f"{name}-{number}", marks=() if name in FIRST and number < 2 else EXHAUSTIVE
    )
    for name in TOWERS
    for number, row in enumerate(ROWS)
    if not (row.get("sp") and name in NO_SEQUENCE)
    and not (row.get("microbatches") and name in PAIRS)
]


@pytest.mark.parametrize(("name", "row"), CASES)
def test_a_step_on_a_mesh_equals_that_on_one_device(name: str, row: Mapping[str, Any]) -> None:
    inputs, expected = plain(name)
    actual = module(name, f"{STEP},partition,units", **row)
    results = run_named(actual, actual.env, inputs)
    assert len(results) == len(expected)
    for theirs, mine in zip(expected.items(), results.items(), strict=True):
        np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-9, atol=1e-9, err_msg=mine[0])


#: Models whose layers are chains of repeats.
CHAINS = [name for name in TOWERS if name not in PAIRS]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "t5" else EXHAUSTIVE) for n in CHAINS]
)
def test_a_pipelined_step_equals_that_on_one_device(name: str) -> None:
    """Encoder and decoder are one chain: what all layers of the decoder attend to is sent along."""
    inputs, expected = plain(name)
    options = {"pp": 2, "dp": 2, "microbatches": 4}
    actual = module(name, f"{STEP},partition,stages,units,plan", **options)
    results = run_named(actual, actual.env, inputs)
    (loss, *rest), (first, *_) = results, expected
    np.testing.assert_allclose(results[loss], expected[first], rtol=1e-9)
    for result in rest:
        theirs = expected[result.removesuffix("_g")]
        np.testing.assert_allclose(results[result], theirs, rtol=1e-9, atol=1e-9, err_msg=result)


SEQUENCES = {
    "bert": ("ulysses", "ring", "all-gather"),
    "clip": ("ulysses", "ring", "all-gather"),
    "t5": ("ulysses", "all-gather"),
    "whisper": ("ulysses", "all-gather"),
    "mllama": ("ulysses", "ring", "all-gather"),
    "FluxTransformer2DModel": ("ulysses", "all-gather"),
    "WanTransformer3DModel": ("ulysses", "all-gather"),
    "PixArtTransformer2DModel": ("ulysses", "all-gather"),
    "QwenImageTransformer2DModel": ("ulysses", "all-gather"),
    "SD3Transformer2DModel": ("ulysses", "all-gather"),
    "DiTTransformer2DModel": ("ulysses", "all-gather"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, m, marks=() if n == "bert" else EXHAUSTIVE)
        for n, modes in SEQUENCES.items()
        for m in modes
    ],
)
def test_a_split_sequence(name: str, mode: str) -> None:
    """Learned positions, pooling and the heads of losses included."""
    inputs, expected = plain(name)
    actual = module(name, f"{STEP},partition,units", cp=2, dp=2, cp_mode=mode)
    results = run_named(actual, actual.env, inputs)
    for (result, mine), theirs in zip(results.items(), expected.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=result)
