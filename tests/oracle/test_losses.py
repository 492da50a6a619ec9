"""Forms of the loss: each has the value and the gradients of the cross entropy by one op, on one
device and over ranks that split batch and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.oracle.test_lora import label
from tests.support import GPT, LLAMA, each_value, inputs_of, operations, pairwise, tiny_module

GRADIENTS = "inline,infer-shapes,apply-strategy,differentiate,eliminate-dead-code"
FORMS = ("stock", "in-place", "fused-in-place", "chunked", "linear")
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "loss": FORMS,
    "mesh": ((1, 1), (1, 2), (2, 1), (2, 2)),
    "zero": (0, 3),
    "microbatches": (1, 2),
}


@cache
def fused(model: str) -> tuple[Any, dict[str, Array]]:
    """Inputs, and the loss and gradients by one op on one device."""
    module = tiny_module(model, GRADIENTS)
    inputs = inputs_of(module, 2)
    return inputs, run_named(module, module.env, inputs)


@pytest.mark.distinct
@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), label))
def test_gradients_are_those_of_one_op(row: dict[str, Any]) -> None:
    options = dict(row)
    model, (dp, tp) = options.pop("model"), options.pop("mesh")
    inputs, expected = fused(model)
    module = tiny_module(model, f"{GRADIENTS},partition", dp=dp, tp=tp, **options)
    actual = list(run_named(module, module.env, inputs).values())
    for theirs, ours in zip(expected.values(), actual, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_linear_loss_has_the_head_inside() -> None:
    """Also where the head is the embedding; a loss of which forward alone is asked has no more."""
    for model in (LLAMA, GPT):
        module = tiny_module(model, GRADIENTS, loss="linear")
        (op,) = operations(module, "stg.linear_cross_entropy")
        assert not operations(module, "stg.cross_entropy")
        assert len(op.results) == 4
