"""ZeRO over ranks that do not divide parameters: what is filled up changes no number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagec.interp.data import filled
from stagec.ir.expr import evaluate
from tests.support import LLAMA, PLACE, STEP, inputs_of, run_numeric, tiny_module

SIZES = {"B": 6, "L": 2}
FSDP = {"recompute": "full", "recompute_every": 2, "shard_units": "ends", "shard_copies": True}
NARROW = {"reduce_dtype": "bf16"}  # and cast behind it: kept until backward ends


@pytest.mark.parametrize("rule", ["dim0", "flat"])
@pytest.mark.parametrize(
    "options",
    [
        {"dp": 3},
        {"dp": 3, "microbatches": 2, **FSDP},
        {"dp_replicate": 2, "dp_shard": 3, **FSDP, **NARROW},
        {"dp": 3, "zero": 1},
        {"dp": 3, "zero": 2, "microbatches": 2},
    ],
    ids=["plain", "fsdp", "hsdp", "stage 1", "stage 2"],
)
def test_a_step_equals_that_on_one_device(rule: str, options: dict[str, Any]) -> None:
    alone = tiny_module(LLAMA, STEP, sizes=SIZES)
    module = tiny_module(
        LLAMA, f"{STEP},{PLACE}", sizes=SIZES, shard_padding=rule, **{"zero": 3, **options}
    )
    inputs = inputs_of(alone, 2)
    names = [a.name for a in module.main.body.args]
    shapes = [[evaluate(s, module.env) for s in a.tensor.shape] for a in module.main.body.args]
    padded = {n: filled(inputs[n], s) for n, s in zip(names, shapes, strict=True)}
    assert any(padded[n].size > inputs[n].size for n in names)
    expected, actual = run_numeric(alone, inputs), run_numeric(module, padded)
    for x, y in zip(expected, actual, strict=True):
        np.testing.assert_allclose(y, filled(x, y.shape), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 3, "tp": 2, "zero": 1},
        {"dp": 3, "tp": 2, "sp": True, "zero": 2, "microbatches": 2},
        {"dp": 3, "tp": 2, "zero": 3},
    ],
    ids=["stage 1", "stage 2", "stage 3"],
)
def test_parameters_that_are_split_have_other_dimensions_to_fill_up(
    options: dict[str, Any],
) -> None:
    test_a_step_equals_that_on_one_device("flat", options)


def test_dimensions_that_divide_together_only() -> None:
    """4 x 6 heads and widths over 8 ranks, none of which divides alone: nothing is filled up."""
    sizes = {"B": 8, "L": 2, "D": 12, "H": 4, "G": 4, "K": 6, "F": 20, "V": 18}
    alone = tiny_module(LLAMA, STEP, sizes=sizes)
    given = {"dp": 8, "zero": 3, "shard_padding": "flat"}
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", sizes=sizes, **given)
    inputs = inputs_of(alone, 2)
    shapes = {
        a.name: [evaluate(s, module.env) for s in a.tensor.shape] for a in module.main.body.args
    }
    padded = {name: filled(inputs[name], shape) for name, shape in shapes.items()}
    assert any(p.shape != inputs[n].shape and p.size == inputs[n].size for n, p in padded.items())
    for x, y in zip(run_numeric(alone, inputs), run_numeric(module, padded), strict=True):
        np.testing.assert_allclose(y, filled(x, y.shape), rtol=1e-10, atol=1e-10)
