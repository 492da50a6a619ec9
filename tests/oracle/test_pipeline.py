"""Pipeline stages, each running its actions in the order of the schedule and talking to the others
by messages, compute what the plain program computes: the loss, and every updated parameter and
state.
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
    GPT,
    LLAMA,
    STEP,
    crossed,
    each_value,
    inputs_of,
    kinds_of_schedules,
    pairwise,
    tiny_module,
)

PLACED = f"{STEP},partition,stages,units,plan"
TOLERANCE = 1e-10
SCALE = 3.0  # makes gradients long enough to be clipped
#: schedule, stages, chunks, microbatches
PIPELINES: Sequence[tuple[str, int, int, int]] = (
    ("gpipe", 2, 1, 3),
    ("1f1b", 2, 1, 4),
    ("1f1b", 4, 1, 2),
    ("interleaved", 2, 2, 4),
    ("interleaved", 2, 4, 2),
    ("looped-bfs", 2, 2, 4),
    ("looped-bfs", 4, 2, 2),
    ("zb-h1", 4, 1, 4),
    ("interleaved-zb", 2, 2, 3),
    ("interleaved-zb", 4, 2, 4),
    ("zbv", 2, 2, 4),
    ("zbv", 4, 2, 8),
    ("dualpipe", 2, 2, 4),
    ("dualpipe", 4, 2, 8),
    ("dualpipev", 2, 2, 4),
)
FACTORS: Mapping[str, Sequence[Any]] = {
    "pipeline": PIPELINES,
    "model": (LLAMA, GPT),
    "mesh": ((1, 1), (2, 1), (1, 2), (2, 2)),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full"),
}


def label(row: Mapping[str, Any]) -> str:
    return "-".join(str(v).strip("()").replace(", ", "-").replace("'", "") for v in row.values())


@cache
def plain(model: str, batch: int, layers: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and results of the program on one device."""
    module = tiny_module(model, STEP, sizes={"L": layers, "B": batch})
    inputs = {n: a * SCALE if a.dtype.kind == "f" else a for n, a in inputs_of(module, 2).items()}
    return inputs, run_named(module, module.env, inputs)


def assert_same(row: Mapping[str, Any]) -> None:
    options = dict(row)
    model, (dp, tp) = options.pop("model"), options.pop("mesh")
    schedule, pp, chunks, microbatches = options.pop("pipeline")
    batch, layers = 4 * microbatches, options.pop("layers", 8)
    inputs, expected = plain(model, batch, layers)
    module = tiny_module(
        model,
        PLACED,
        sizes={"L": layers, "B": batch},
        pp=pp,
        dp=dp,
        tp=tp,
        schedule=schedule,
        chunks=chunks,
        microbatches=microbatches,
        **options,
    )
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=TOLERANCE)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered updates of ZeRO-1 and 2
        np.testing.assert_allclose(
            actual[name], theirs, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


UNEVEN: Sequence[dict[str, Any]] = (
    {"pipeline": ("1f1b", 4, 1, 4), "layers": ()},  # 1, 2, 2, 1
    {"pipeline": ("interleaved", 2, 4, 2), "layers": ()},  # none on the first and the last part
    {"pipeline": ("zbv", 2, 2, 4), "layers": (0, 5, 1, 0)},
    {"pipeline": ("1f1b", 4, 1, 4), "layers": (3, 0, 0, 3)},  # two stages only pass on
    {"pipeline": ("zbv", 2, 2, 4), "layers": (3, 0, 0, 3)},
    {"pipeline": ("interleaved", 2, 4, 4), "layers": (0, 0, 2, 0, 0, 3, 1, 0)},
    {"pipeline": ("dualpipe", 4, 2, 8), "layers": (0, 0, 6, 0)},
    {"pipeline": ("dualpipe", 2, 2, 4), "layers": (5, 1)},
)


@pytest.mark.parametrize(
    "row", each_value([{**row, "model": model} for row in UNEVEN for model in (LLAMA, GPT)], label)
)
def test_parts_of_the_model_may_differ(row: dict[str, Any]) -> None:
    given = {"pipeline": row["pipeline"], "stage_layers": row["layers"], "layers": 6}
    assert_same({**given, "model": row["model"], "mesh": (2, 1), "zero": 1})


@pytest.mark.long
@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), label))
def test_a_pipelined_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    assert_same(row)


@pytest.mark.parametrize("schedule", kinds_of_schedules([p for p in PIPELINES if p[1] == 2]))
def test_parameters_that_are_kept_for_all_microbatches(schedule: tuple[str, int, int, int]) -> None:
    row = {"pipeline": schedule, "model": LLAMA, "mesh": (2, 1), "zero": 3}
    assert_same({**row, "reshard_after_forward": "never", "recompute": "selective"})


@pytest.mark.parametrize("schedule", kinds_of_schedules([p for p in PIPELINES if p[1] == 2]))
def test_parameters_that_are_gathered_first(schedule: tuple[str, int, int, int]) -> None:
    """ZeRO-1, of which a stage gathers what it updated in the step before."""
    row = {"pipeline": schedule, "model": LLAMA, "mesh": (2, 1), "zero": 1}
    assert_same({**row, "overlap_param_gather": True})


@crossed(schedule=["1f1b", "zbv", "dualpipe"], model=[LLAMA, GPT])
def test_messages_in_parts(schedule: str, model: str) -> None:
    """Each of the ranks that hold the same sends a part, and the receivers put them together."""
    chunks = 1 if schedule == "1f1b" else 2
    row = {"pipeline": (schedule, 2, chunks, 4), "model": model, "mesh": (1, 2), "zero": 0}
    assert_same({**row, "scatter_gather": True, "layers": 4})


@pytest.mark.parametrize("schedule", kinds_of_schedules([p for p in PIPELINES if p[1] == 2]))
def test_activations_on_the_host(schedule: tuple[str, int, int, int]) -> None:
    row = {"pipeline": schedule, "model": LLAMA, "mesh": (1, 2), "zero": 0}
    assert_same({**row, "offload": "activations", "recompute": "selective"})
