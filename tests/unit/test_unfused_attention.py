"""Attention that runs operation by operation computes what its kernel does."""

from __future__ import annotations

import numpy as np

from tests.support import compiled, inputs_of, run_numeric

PROGRAM = """
stg.module @m {{
  stg.symbols[B = 2, S = 5, H = 3, K = 4]
  stg.strategy @s {{
    stg.kernels[attention = flash_2, eager = {name}]
  }}
  stg.func @f(%q: f32[B, S, H, K], %k: f32[B, S, H, K], %v: f32[B, S, H, K]) -> f32[B, S, H, K] {{
    %a = stg.attention[causal, alibi](%q, %k, %v) : f32[B, S, H, K]
    stg.return(%a)
  }}
}}
"""


def test_a_bias_by_distance() -> None:
    fused, unfused = (
        compiled(PROGRAM.format(name=name), "infer-shapes,expand-kernels,expand-attention")
        for name in ("gelu", "alibi")
    )
    assert any(op.name == "stg.softmax" for op in unfused.main.body.walk())
    inputs = inputs_of(fused)
    (expected,), (actual,) = run_numeric(fused, inputs), run_numeric(unfused, inputs)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
