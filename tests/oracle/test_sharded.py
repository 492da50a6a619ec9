"""The partitioned program, all ranks in lockstep, computes what the plain program computes.

The plain program is the model on one device, without strategy; the grid of strategies covers every
pair of their options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.support import (
    GPT,
    LLAMA,
    PLACE,
    STEP,
    each_value,
    inputs_of,
    operations,
    pairwise,
    run_numeric,
    tiny_module,
)

GRADIENTS = "inline,infer-shapes,apply-strategy,differentiate,eliminate-dead-code"
TOLERANCE = 1e-10
SCALE = 3.0  # makes gradients long enough to be clipped
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "mesh": ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1)),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2),
    "no_vocab_parallel": (False, True),
    "tp_inputs": ("regather", "save-gathered"),
    "grad_dtype": ("f32", "bf16"),
    "ddp_bucket": (0, 64),
}
#: Pairs that matter most are crossed in full: the mesh, sequence parallelism, the ZeRO stage.
CORE: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "mesh": ((2, 2), (1, 2), (4, 1)),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
}


def grid() -> list[dict[str, Any]]:
    """All pairs of options, and all triples of the core ones on a mesh of both axes."""
    rows = list(pairwise(FACTORS))
    rows += [
        {"model": m, "mesh": (2, 2), "sp": sp, "zero": z, "microbatches": n}
        for m in FACTORS["model"]
        for sp in (False, True)
        for z in range(4)
        for n in (1, 2)
    ]
    return rows


def label(row: Mapping[str, Any]) -> str:
    return "-".join(
        f"{n}={v}".replace("(", "").replace(")", "").replace(", ", "x") for n, v in row.items()
    )


@cache
def plain(model: str, program: str) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the program on one device."""
    module = tiny_module(model, program)
    inputs = {n: a * SCALE if a.dtype.kind == "f" else a for n, a in inputs_of(module, 2).items()}
    return inputs, run_numeric(module, inputs)


def assert_same(row: Mapping[str, Any], program: str) -> None:
    options = dict(row)
    model, (dp, tp) = options.pop("model"), options.pop("mesh")
    inputs, expected = plain(model, program)
    module = tiny_module(model, f"{program},{PLACE}", dp=dp, tp=tp, **options)
    actual = run_numeric(module, inputs)
    names = [v.name for v in module.main.body.terminator.operands]
    assert len(actual) == len(expected)
    for name, x, y in zip(names, expected, actual, strict=True):
        np.testing.assert_allclose(y, x, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("row", each_value(grid(), label))
def test_a_training_step_on_a_mesh_equals_that_on_one_device(row: dict[str, Any]) -> None:
    assert_same(row, STEP)


@pytest.mark.parametrize("row", each_value(pairwise(CORE), label))
def test_gradients_on_a_mesh_equal_those_on_one_device(row: dict[str, Any]) -> None:
    assert_same(row, GRADIENTS)


def test_gradients_are_large_enough_to_be_clipped() -> None:
    """Else a wrong gradient norm would go unseen in the grid above."""
    for model in (LLAMA, GPT):
        _, results = plain(model, GRADIENTS)
        assert np.sqrt(sum(float((g * g).sum()) for g in results[1:])) > 1


def test_the_grid_has_every_kind_of_collective() -> None:
    """A strategy that silently did nothing would pass the comparison."""
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", dp=2, tp=2, sp=True, zero=3)
    kinds = {op.name for op in module.walk() if "over" in op.attrs and op.results}
    assert {"stg.all_gather", "stg.all_reduce", "stg.reduce_scatter"} <= kinds
    assert {a for op in operations(module, "stg.all_gather") for a in op.names("over")} == {
        "dp",
        "tp",
    }
