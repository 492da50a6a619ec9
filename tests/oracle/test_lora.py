"""Adapters and frozen parameters: gradients are those of the whole model, and all ranks together
compute what one device computes, under every kind of strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.support import (
    GPT,
    LLAMA,
    MIXTRAL,
    STEP,
    compiled,
    each_value,
    inputs_of,
    operations,
    pairwise,
    run_numeric,
    run_passes,
    tiny_module,
)

PLACED = f"{STEP},partition,stages,units,plan"
ADAPTED = "inline,infer-shapes,apply-strategy"
TARGETS = {LLAMA: "wq,wv,w_gate_up,w_down", GPT: "wqkv,wo,w1", MIXTRAL: "wq,w_gate_up,w_down"}
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": tuple(TARGETS),
    "mesh": ((1, 2), (2, 1), (2, 2), (4, 1)),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2),
    "recompute": ("none", "selective", "full"),
    "fp8": ("none", "hybrid"),
}
PIPELINES: Sequence[dict[str, Any]] = (
    {"model": LLAMA, "schedule": "1f1b", "zero": 1},
    {"model": GPT, "schedule": "zbv", "chunks": 2, "zero": 0},
    {"model": LLAMA, "schedule": "interleaved", "chunks": 2, "zero": 3},
    {"model": LLAMA, "schedule": "zbv", "chunks": 2, "zero": 2, "recompute": "full"},
)


def label(row: Mapping[str, Any]) -> str:
    return "-".join(str(v).replace(" ", "") for v in row.values())


def module(model: str, passes: str, **options: Any) -> Any:
    return tiny_module(model, passes, lora=TARGETS[model], lora_rank=2, **options)


@cache
def plain(model: str, passes: str, sizes: tuple[tuple[str, int], ...] = ()) -> Any:
    """Inputs and results of the program on one device."""
    actual = module(model, passes, sizes=dict(sizes))
    inputs = {n: a * 3.0 if a.dtype.kind == "f" else a for n, a in inputs_of(actual, 2).items()}
    return inputs, run_named(actual, actual.env, inputs)


def assert_same(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
    assert len(actual) == len(expected)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=1e-10)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("model", TARGETS)
def test_gradients_are_those_of_the_model_that_is_trained_whole(model: str) -> None:
    """Only those of the adapters are left, and only what they need is computed and stashed."""
    frozen = module(model, ADAPTED)
    whole = module(model, ADAPTED)
    adapters = [p.name for p in frozen.trainable()]
    assert adapters
    assert all("_lora_" in name for name in adapters)
    for param in whole.parameters():
        param.type = replace(param.tensor, role="param")
    names = [p.name for p in whole.trainable()]
    inputs = inputs_of(frozen, 2)
    run_passes(frozen, "differentiate,eliminate-dead-code")
    run_passes(whole, "differentiate,eliminate-dead-code")
    loss, *few = run_numeric(frozen, inputs)
    expected, *every = run_numeric(whole, inputs)
    assert loss == expected
    all_of_them = dict(zip(names, every, strict=True))
    for name, gradient in zip(adapters, few, strict=True):
        np.testing.assert_allclose(gradient, all_of_them[name], rtol=1e-12, err_msg=name)
        assert np.abs(gradient).max() > 0
    products = [len(operations(m, "stg.einsum")) for m in (frozen, whole)]
    assert products[0] < products[1]


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), label))
def test_a_step_on_a_mesh_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    model, (dp, tp) = options.pop("model"), options.pop("mesh")
    inputs, expected = plain(model, STEP)
    actual = module(model, f"{STEP},partition,units", dp=dp, tp=tp, **options)
    assert_same(expected, run_named(actual, actual.env, inputs))


@pytest.mark.parametrize("row", each_value(PIPELINES, label))
def test_a_pipelined_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options, sizes = dict(row), {"L": 8, "B": 16}
    model = options.pop("model")
    inputs, expected = plain(model, STEP, tuple(sizes.items()))
    actual = module(model, PLACED, sizes=sizes, pp=2, dp=2, tp=1, microbatches=4, **options)
    assert_same(expected, run_named(actual, actual.env, inputs))


def test_adapters_in_fp32_compute_the_same() -> None:
    """Casts of their inputs and results change no value in exact arithmetic."""
    given, wide = (module(LLAMA, ADAPTED, lora_dtype=dtype) for dtype in ("given", "f32"))
    assert {p.tensor.dtype for p in wide.trainable()} == {"f32"}
    inputs = inputs_of(given, 2)
    for each in (given, wide):
        run_passes(each, "differentiate,eliminate-dead-code")
    for one, other in zip(run_numeric(given, inputs), run_numeric(wide, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_scaled_adapter() -> None:
    """alpha / rank, as the paper has it: doubling both A's result and alpha is the same."""
    text = f"{ADAPTED.split(',apply', maxsplit=1)[0]},add-lora{{targets=(wq), rank=2, alpha=6}}"
    scaled, once = (tiny_module(LLAMA, t) for t in (text, text.replace(", alpha=6", "")))
    inputs = inputs_of(scaled, 2)
    (loss,) = run_numeric(scaled, inputs)
    (same,) = run_numeric(
        once, {n: a * 3 if n.endswith("lora_b") else a for n, a in inputs.items()}
    )
    np.testing.assert_allclose(loss, same, rtol=1e-12)


def test_a_frozen_tower_has_no_backward() -> None:
    """No part of it is in backward, and nothing of it is stashed."""
    text = """stg.module @m {
  stg.symbols[B = 2, D = 4, L = 2]
  stg.func @f(%x: f32[B, D], %y: f32[B, D], %W: f32[L, D, D | frozen], %w: f32[D, D | param]) {
    %t = stg.repeat[count = L, carry = 1] (%h = %x, %v = %W) {
      %u = stg.einsum["bd,de->be"](%h, %v)
      %g = stg.silu(%u)
      stg.yield(%g)
    }
    %z = stg.einsum["bd,de->be"](%t, %w)
    %loss = stg.mse[mean = B*D](%z, %y)
    stg.return(%loss)
  }
}"""
    actual = compiled(text, "infer-shapes,differentiate")
    (tower,) = operations(actual, "stg.repeat")
    assert len(tower.results) == 1
