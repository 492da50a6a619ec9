"""Attention that runs operation by operation computes what its kernel does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stagec
from tests.support import compiled, inputs_of, run_numeric
from tests.support import stagec as run

PROGRAM = """
stg.module @m {{
  stg.symbols[B = 2, S = 5, H = 3, K = 4]
  stg.strategy @s {{
    stg.kernels[attention = flash_2, eager = {name}]
  }}
  stg.func @f(
      %q: f32[B, S, H, K | param], %k: f32[B, S, H, K | param], %v: f32[B, S, H, K | param],
      %s: f32[H | param]) -> f32[] {{
    %a = stg.attention[causal, {flag}](%q, %k, %v{more}) : f32[B, S, H, K]
    %b = stg.gelu(%a)
    %h = stg.einsum["bshk,bshk->h"](%b, %v) : f32[H]
    %c = stg.einsum["h,h->"](%h, %s) : f32[]
    stg.return(%c)
  }}
}}
"""


@pytest.mark.parametrize(("flag", "more"), [("alibi", ""), ("sinks", ", %s")])
def test_operations_compute_what_the_kernel_does(flag: str, more: str) -> None:
    """Also gradients, those of sinks among them."""
    fused, unfused = (
        compiled(
            PROGRAM.format(name=name, flag=flag, more=more),
            "infer-shapes,expand-kernels,expand-attention,differentiate",
        )
        for name in ("gelu", flag)
    )
    ops = {op.name for op in unfused.main.body.walk()}
    assert ops & {"stg.softmax_grad", "stg.sink_softmax_grad"}
    assert "stg.attention" not in ops
    inputs = inputs_of(fused)
    for expected, actual in zip(
        run_numeric(fused, inputs), run_numeric(unfused, inputs), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)


def test_texts_that_write_products_run_the_kernel_of_a_stack() -> None:
    """GPT-3 with Megatron-Core keeps no shares, in two copies of 2 bytes and a mask of 1, but a
    sum in fp32 for each row: 12 heads per rank, 12 layers per stage, 8 microbatches."""
    flags: dict[str, Any] = {"tp": 8, "pp": 8, "sp": True, "microbatches": 8, "sizes": {"B": 8}}
    alone, core = (
        stagec.job("gpt3-175b", stack=stack, **flags).memory().as_json()["classes"][0]["memory"]
        for stack in ("ideal", "megatron-core")
    )
    rows = 12 * 2048 * 12 * 8
    alone, core = (each["after_forward"]["by"]["activations"] for each in (alone, core))
    kept = alone - core
    assert kept == rows * (5 * 2048 - 4)


@pytest.mark.parametrize(
    ("flags", "remarked"), [(("--stack", "megatron-core"), False), (("--eager", "clamp"), True)]
)
def test_a_shipped_stack_may_name_kernels_that_a_model_has_not(
    flags: tuple[str, str], remarked: bool
) -> None:
    """Megatron-Core names `clamp`, which GPT-3 has not; a flag that names it gets a remark."""
    said = run("memory", "gpt3-175b", "--set", "L=1,S=64,B=1", *flags)
    assert ("none of these ops" in said.err) == remarked
