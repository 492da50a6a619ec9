"""Adapters of a base of few bits: loss and gradients are those of the base as it is decoded, on one
device and over ranks; frozen parameters leave the gradients of the others as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from stagec.ir_spec.ops.quantized import TABLES
from tests.oracle.test_lora import TARGETS, label
from tests.support import GPT, LLAMA, each_value, inputs_of, operations, pairwise, tiny_module

GRADIENTS = "inline,infer-shapes,apply-strategy,differentiate,eliminate-dead-code"
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "weight_dtype": ("nf4", "fp8"),
    "mesh": ((1, 1), (1, 2), (2, 2)),
    "zero": (0, 3),
    "recompute": ("none", "full"),
}


def decoded(codes: Array, scales: Array, format_: str) -> Array:
    """A weight from what is stored of it."""
    if format_ == "nf4":
        codes = np.array(TABLES["nf4"])[codes]
    for dim, size in enumerate(codes.shape):
        scales = np.repeat(scales, size // scales.shape[dim], dim)
    return codes * scales


@pytest.mark.distinct
@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), label))
def test_gradients_are_those_of_the_decoded_base(row: dict[str, Any]) -> None:
    options = dict(row)
    model, (dp, tp) = options.pop("model"), options.pop("mesh")
    lora = {"lora": TARGETS[model], "lora_rank": 2}
    options["weight_block"] = 2
    stored = tiny_module(model, f"{GRADIENTS},partition", dp=dp, tp=tp, **lora, **options)
    plain = tiny_module(model, GRADIENTS, **lora)
    inputs = inputs_of(stored, 2)
    full = dict(inputs)
    for name in [n.removesuffix("_scales") for n in inputs if n.endswith("_scales")]:
        full[name] = decoded(inputs[name], full.pop(f"{name}_scales"), row["weight_dtype"])
    assert len(full) < len(inputs)
    expected = run_named(plain, plain.env, full)
    actual = run_named(stored, stored.env, inputs)
    for theirs, ours in zip(expected.values(), actual.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_each_product_decodes_for_itself() -> None:
    """In forward and in backward: no decoded weight is stashed."""
    module = tiny_module(LLAMA, GRADIENTS, lora="wq", weight_dtype="nf4", weight_block=2)
    products = operations(module, "stg.scaled_einsum")
    assert {op.phase for op in products} == {"forward", "backward"}
    assert not any(op.results[1].uses for op in products)


@pytest.mark.distinct
@pytest.mark.parametrize("loss", ["fused", "linear"])
@pytest.mark.parametrize("names", ["embed", "layers", "head", "*,!head", "swiglu,!w_down"])
def test_gradients_of_what_is_left_stay(names: str, loss: str) -> None:
    whole = tiny_module(LLAMA, GRADIENTS)
    few = tiny_module(LLAMA, GRADIENTS, freeze=names, loss=loss)
    inputs = inputs_of(whole, 2)
    expected = run_named(whole, whole.env, inputs)
    value, *gradients = run_named(few, few.env, inputs).values()
    first, *every = expected.values()
    np.testing.assert_allclose(value, first, rtol=1e-12)
    by_name = dict(zip((p.name for p in whole.trainable()), every, strict=True))
    trained = [p.name for p in few.trainable()]
    assert 0 < len(trained) < len(every)
    for name, gradient in zip(trained, gradients, strict=True):
        np.testing.assert_allclose(gradient, by_name[name], rtol=1e-9, atol=1e-12, err_msg=name)
