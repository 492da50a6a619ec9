"""Models imported from small configurations: a step under a strategy computes what it computes on
one device, for every family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.importers import attended, classic, deepseek, further, llama, mixture
from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from tests.configurations import FIRST, small
from tests.support import STEP, inputs_of, pairwise, run_passes

PLACED = f"{STEP},partition,stages,units,plan"
FACTORS: Mapping[str, Sequence[Any]] = {
    "tensor": ((1, False), (2, False), (2, True), (4, True)),
    "context": ("", "all-gather", "ulysses", "ring"),
    "data": ((1, 1), (2, 1), (2, 2)),
    "zero": (0, 1, 3),
    "pipeline": (("", 1, 0, 1), ("1f1b", 2, 1, 2), ("interleaved", 2, 2, 2)),
    "recompute": ("none", "selective", "full"),
}
#: Those of other modules have tests of their own.
TYPES = [
    name
    for module in (llama, classic, attended, mixture, deepseek, further)
    for family in module.FAMILIES
    for name in family.model_types
]


#: Families whose attention sees selected keys, which do not go round a ring.
SELECTING = ("deepseek_v32",)
#: Families with learned positions.
SLICED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "mpt")
#: Strategies for each family; all families together have every pair of options.
STRATEGIES = 8


def _rows() -> list[Any]:
    rows = list(pairwise(FACTORS))
    cases: list[Any] = []
    for place, model_type in enumerate(TYPES):
        for number in range(STRATEGIES):
            row = rows[(place * STRATEGIES + number) % len(rows)]
            first = model_type in FIRST and number == 0
            marks = () if first else (pytest.mark.exhaustive,)
            cases.append(pytest.param(model_type, row, id=f"{model_type}-{number}", marks=marks))
    return cases


def _options(model_type: str, row: Mapping[str, Any]) -> dict[str, Any]:
    schedule, pp, chunks, microbatches = row["pipeline"]
    tp, sp = row["tensor"]
    dp, ep = row["data"]
    given: dict[str, Any] = {"tp": tp, "sp": sp, "dp": dp, "microbatches": microbatches}
    given |= {"zero": row["zero"], "recompute": row["recompute"]}
    if pp > 1:
        given |= {"pp": pp, "schedule": schedule, "chunks": chunks}
    if row["context"]:
        one_head = model_type in ("gpt_bigcode", "falcon", "RefinedWeb", "RefinedWebModel")
        few = row["context"] == "ulysses" and (tp > 2 or one_head)
        whole = row["context"] == "ring" and model_type in SELECTING
        given |= {"cp": 2, "cp_mode": "all-gather" if few or whole else row["context"]}
        # zigzag is no order for learned positions: a slice needs them in a row
        given |= (
            {"cp_order": "plain"} if given["cp_mode"] == "ring" and model_type in SLICED else {}
        )
    if "expert" in " ".join(small(model_type)):
        given["ep"] = ep
    return given


def _module(path: Path, pipeline: str, **options: Any) -> Module:
    sizes = {"B": 8, "S": 32}
    builder = JobBuilder(JobOptions(str(path), sizes=sizes, **options))
    return run_passes(builder.module, pipeline)


@cache
def _plain(path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    module = _module(path, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_named(module, module.env, inputs)


@pytest.mark.parametrize(("model_type", "row"), _rows())
def test_a_step_equals_that_on_one_device(
    model_type: str, row: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"{model_type}.json"
    path.write_text(json.dumps(small(model_type)))
    inputs, expected = _plain(path)
    module = _module(path, PLACED, **_options(model_type, row))
    found = run_named(module, module.env, inputs)
    (loss, *rest), (expected_loss, *_) = found, expected
    np.testing.assert_allclose(found[loss], expected[expected_loss], rtol=1e-10)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered
        np.testing.assert_allclose(found[name], theirs, rtol=1e-8, atol=1e-9, err_msg=name)
