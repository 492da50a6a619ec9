"""State-space models, linear attention and hybrids, imported at small sizes: the sharded step
computes what one device computes, for every kind of parallelism."""

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
from tests.configurations import SCANS, small
from tests.support import PLACE, STEP, each_value, inputs_of, pairwise, run_numeric, run_passes

RINGS = {
    "mamba",
    "falcon_mamba",
    "mamba2",
    "rwkv6",
    "rwkv7",
}  # without attention no order is to be chosen
FACTORS: Mapping[str, Sequence[Any]] = {
    "axes": (
        {"tp": 2},
        {"cp": 2},
        {"dp": 2, "cp": 2},
        {"cp": 2, "tp": 2},
        {"cp": 4},
        {"dp": 2, "tp": 2},
        {"dp": 4},
    ),
    "cp_mode": ("ring", "ulysses"),
    "sp": (False, True),
    "zero": (0, 1, 3),
    "recompute": ("none", "selective", "full"),
    "microbatches": (1, 2),
}
SIZES = {"B": 8, "S": 16}


@cache
def _file(family: str) -> str:
    path = Path(mkdtemp(prefix="stagec-")) / "config.json"
    path.write_text(json.dumps(small(family)))
    return str(path)


def module_of(family: str, pipeline: str, **options: Any) -> Module:
    job = JobOptions(_file(family), sizes=SIZES, **options)
    return run_passes(JobBuilder(job).module, pipeline)


@cache
def alone(family: str) -> tuple[dict[str, Array], Mapping[str, Array]]:
    """Inputs and results of the step on one device."""
    module = module_of(family, f"inline,{STEP}")
    inputs = inputs_of(module, 2)
    names = [v.name for v in module.main.body.terminator.operands]
    return inputs, dict(zip(names, run_numeric(module, inputs), strict=True))


def rows() -> list[Any]:
    """Eight strategies for every family, of those that hold every pair of values."""
    drawn = list(pairwise(FACTORS))
    actual = [
        {"family": family, **drawn[(8 * number + i) % len(drawn)]}
        for number, family in enumerate(SCANS)
        for i in range(8)
    ]
    return each_value(actual, lambda r: "-".join(map(str, r.values())).replace(" ", ""))


@pytest.mark.parametrize("row", rows())
def test_a_hybrid_equals_one_device(row: dict[str, Any]) -> None:
    """Loss, updated parameters and optimizer state, which hold every gradient."""
    options = {k: v for k, v in row.items() if k not in ("axes", "family", "cp_mode")}
    if "cp" in row["axes"]:
        options["cp_mode"] = row["cp_mode"]
        if row["cp_mode"] == "ring" and row["family"] not in RINGS:
            options["cp_order"] = "plain"
    options["sp"] = row["sp"] and "tp" in row["axes"]
    options["zero"] = row["zero"] if "dp" in row["axes"] else 0
    module = module_of(row["family"], f"inline,{STEP},{PLACE}", **row["axes"], **options)
    inputs, expected = alone(row["family"])
    actual = run_numeric(module, inputs)
    for (name, x), y in zip(expected.items(), actual, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "family",
    [
        f if f in ("nemotron_h", "rwkv7") else pytest.param(f, marks=pytest.mark.exhaustive)
        for f in SCANS
    ],
)
def test_a_pipeline_of_a_hybrid_equals_one_device(family: str) -> None:
    order = {} if family in RINGS else {"cp_order": "plain"}
    whole = module_of(family, f"inline,{STEP}")
    inputs = inputs_of(whole, 2)
    expected = run_named(whole, whole.env, inputs)
    passes = f"inline,{STEP},partition,stages,units"
    module = module_of(family, passes, pp=2, cp=2, microbatches=2, **order)
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    (_, loss), *rest = actual.items()
    np.testing.assert_allclose(loss, next(iter(expected.values())), rtol=1e-9)
    for name, x in rest:
        theirs = expected[name.removesuffix("_g")]
        np.testing.assert_allclose(x, theirs, rtol=1e-8, atol=1e-9, err_msg=name)
