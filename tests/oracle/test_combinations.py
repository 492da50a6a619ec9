"""Every pair of features meets: pipeline schedules, data, tensor, sequence, context and expert
parallelism, ZeRO, recompute. A step under each combination computes what one device computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.support import (
    DEEPSEEK,
    DEEPSEEK_MTP,
    LLAMA,
    MIXTRAL,
    STEP,
    each_value,
    inputs_of,
    pairwise,
)
from tests.support import tiny_module as tiny

PLACED = f"{STEP},partition,stages,units,plan"
#: schedule, stages, chunks, microbatches
PIPELINES: Sequence[tuple[str, int, int, int]] = (
    ("", 1, 0, 1),
    ("", 1, 0, 2),
    ("gpipe", 2, 1, 2),
    ("1f1b", 2, 1, 2),
    ("interleaved", 2, 2, 2),
    ("zb-h1", 2, 1, 2),
    ("zbv", 2, 2, 2),
    ("dualpipe", 2, 2, 4),
    ("dualpipev", 2, 2, 4),
)
MODELS = (LLAMA, MIXTRAL, DEEPSEEK)
FACTORS: Mapping[str, Sequence[Any]] = {
    "pipeline": PIPELINES,
    "context": (
        ("", ""),
        ("ring", "zigzag"),
        ("ring", "plain"),
        ("ulysses", ""),
        ("all-gather", ""),
    ),
    "tensor": ((1, False), (2, False), (2, True)),
    "data": ((1, 1), (2, 1), (2, 2)),  # ranks, of which share the experts
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full", "full-replay", "attention"),
    "reshard": ("always", "never", "last"),
    "offload": ("", "activations", "optimizer"),
    "types": (("bf16", "none"), ("f32", "none"), ("bf16", "hybrid")),
}
SIZES = {"L": 4, "S": 8}


def rows() -> list[dict[str, Any]]:
    """All pairs of options, for each model; every pipeline for the one with two heads."""
    actual = [{"model": model, **row} for model in MODELS for row in pairwise(FACTORS)]
    first = {name: values[0] for name, values in FACTORS.items()}
    return [*actual, *({**first, "model": DEEPSEEK_MTP, "pipeline": p} for p in PIPELINES)]


def label(row: Mapping[str, Any]) -> str:
    names = sorted(row)
    return "-".join(str(row[n]).strip("()").replace(", ", "-").replace("'", "") for n in names)


@cache
def plain(model: str, batch: int, param_dtype: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and results of the program on one device."""
    module = tiny(model, STEP, sizes={**SIZES, "B": batch}, param_dtype=param_dtype)
    inputs = inputs_of(module, 2)
    return inputs, run_named(module, module.env, inputs)


def options_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a combination; what has no meaning in it is left out."""
    schedule, pp, chunks, microbatches = row["pipeline"]
    mode, order = row["context"]
    tp, sp = row["tensor"]
    dp, ep = row["data"]
    given: dict[str, Any] = {"microbatches": microbatches, "tp": tp, "sp": sp, "dp": dp}
    given |= {"zero": row["zero"], "recompute": row["recompute"], "offload": row["offload"]}
    given["param_dtype"], given["fp8"] = row["types"]
    if pp > 1:
        given |= {"pp": pp, "schedule": schedule, "chunks": chunks}
    if mode:
        given |= {"cp": 2, "cp_mode": mode}
        given |= {"cp_order": order} if order else {}
    if row["model"] != LLAMA:
        given["ep"] = ep
    if row["zero"] == 3:
        given["reshard_after_forward"] = row["reshard"]
    if row["zero"] == 1 and row["reshard"] == "last":
        given["grad_collective"] = "all-reduce"
    return given


@pytest.mark.parametrize("row", each_value(rows(), label))
def test_a_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    batch = 8 * row["pipeline"][3] // 2 or 8
    inputs, expected = plain(row["model"], batch, row["types"][0])
    module = tiny(row["model"], PLACED, sizes={**SIZES, "B": batch}, **options_of(row))
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=1e-10)
    for name in rest:
        theirs = expected[name.removesuffix("_g").removesuffix("_host")]  # gathered, offloaded
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-9, atol=1e-10, err_msg=name)
