"""Widths that are filled up with zeros change nothing that a server computes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.served import step_modules
from tests.support import LLAMA, MIXTRAL, tiny_options


def logits_of(inputs: dict[str, Array], model: str, **options: Any) -> tuple[Array, int]:
    """The logits of a step of decode on these numbers, filled up with zeros; new ones are added.
    And how many values have been filled up."""
    job = tiny_options(model, **options)
    stated, ready = step_modules(job, "decode", 1, 2)
    fresh, filled = random_inputs(stated.main.body.args, ready.env, 5), 0
    for name, value in fresh.items():
        known: Array = inputs.setdefault(name, value)
        more = [(0, n - m) for n, m in zip(value.shape, known.shape, strict=True)]
        fresh[name] = np.pad(known, more)
        filled += known.shape != value.shape
    name = stated.main.body.terminator.operands[0].name
    return run_named(ready, ready.env, fresh)[name], filled


@pytest.mark.parametrize(
    ("model", "options"), [(LLAMA, {}), (MIXTRAL, {"capacity_factor": Fraction(2)})]
)
def test_columns_of_zeros_change_nothing(model: str, options: dict[str, Any]) -> None:
    inputs: dict[str, Array] = {}
    plain, _ = logits_of(inputs, model, **options)
    padded, filled = logits_of(inputs, model, **options, tp=2, pad_widths=24)
    assert filled == 2, "of gate and up, and of down"
    np.testing.assert_allclose(padded, plain, rtol=1e-9, atol=1e-9)
