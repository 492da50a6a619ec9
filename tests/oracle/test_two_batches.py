"""Two half batches compute what one batch does."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.served import step_modules
from tests.support import MIXTRAL, QWEN, tiny_options


@pytest.mark.parametrize(
    ("model", "options"),
    [(MIXTRAL, {"dp": 2, "ep": 2}), (QWEN, {"dp": 2, "ep": 4, "tp": 2, "moe_dispatch": "gather"})],
)
def test_halves_make_the_logits_of_the_whole(model: str, options: dict[str, Any]) -> None:
    capacity = Fraction(2)
    plain = tiny_options(model, capacity_factor=capacity)
    stated, ready = step_modules(plain, "decode", 1, 2)
    inputs = random_inputs(stated.main.body.args, stated.env, 5)
    name = stated.main.body.terminator.operands[0].name
    expected: Array = run_named(ready, ready.env, inputs)[name]
    job = tiny_options(model, capacity_factor=capacity, two_batch_overlap=True, **options)
    _, halved = step_modules(job, "decode", 1, 2)
    given: dict[str, Array] = {}
    for arg in halved.main.body.args:
        whole, half = arg.name[:-2], "ab".find(arg.name[-1])
        if arg.name in inputs:
            given[arg.name] = inputs[arg.name]
            continue
        batch = next(i for i, d in enumerate(arg.tensor.dims) if "B" in d.size.symbols)
        given[arg.name] = np.split(inputs[whole], 2, axis=batch)[half]
    actual = run_named(halved, halved.env, given)
    logits = np.concatenate([actual[f"{name}_a"], actual[f"{name}_b"]])
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)
