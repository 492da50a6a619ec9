"""Ring attention: the sharded step computes what one device computes, in every order and with
every other kind of parallelism; its traffic and work are those of the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.support import (
    LLAMA,
    PLACE,
    STEP,
    compiled,
    inputs_of,
    operations,
    pairwise,
    run_numeric,
    tiny_module,
)

FACTORS: Mapping[str, Sequence[Any]] = {
    "cp_order": ("zigzag", "plain"),
    "axes": (
        {"cp": 2},
        {"cp": 4},
        {"cp": 3},
        {"cp": 2, "tp": 2},
        {"cp": 2, "dp": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp": 2, "cp": 2, "tp": 2},
    ),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full", "full-replay"),
    "microbatches": (1, 2),
    "tp_inputs": ("regather", "save-gathered"),
    "grad_dtype": ("f32", "bf16"),
    "param_dtype": ("bf16", "f32"),
}
SIZES = {"S": 24, "D": 24}


@cache
def plain(param_dtype: str) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(LLAMA, STEP, sizes=SIZES, param_dtype=param_dtype)
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


def label(row: Mapping[str, Any]) -> str:
    axes = ",".join(f"{a}{n}" for a, n in row["axes"].items())
    return "-".join([axes, *(f"{v}" for n, v in row.items() if n != "axes")])


@pytest.mark.parametrize("row", list(pairwise(FACTORS)), ids=label)
def test_a_ring_equals_one_device(row: dict[str, Any]) -> None:
    """Loss, updated parameters and optimizer state, which hold every gradient."""
    options = dict(row)
    axes = options.pop("axes")
    inputs, expected = plain(row["param_dtype"])
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", **axes, **options, sizes=SIZES)
    assert operations(module, "stg.shift")
    names = [v.name for v in module.main.body.terminator.operands]
    found = run_numeric(module, inputs)
    for name, x, y in zip(names, expected, found, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


#: One layer with keys and values packed in one value, learned positions and dropout.
PACKED = """stg.module @packed {{
  stg.symbols[B = 2, S = 24, D = 8, H = 4, G = 2, K = 2]
  {mesh}
  stg.func @f(%x: f32[B, S, D], %positions: f32[S, D | param],
              %wq: f32[D, H, K | param], %wkv: f32[D, 2, G, K | param]) {{
    %p = stg.add["bsd,sd->bsd"](%x, %positions)
    %h = stg.dropout[p = 1/4, seed = 3](%p)
    %q = stg.einsum["bsd,dhk->bshk"](%h, %wq)
    %kv = stg.einsum["bsd,dzgk->bzsgk"](%h, %wkv)
    %a = stg.attention{causal}(%q, %kv)
    %sq = stg.mul(%a, %a)
    %loss = stg.sum["bshk->"](%sq)
    stg.return(%loss)
  }}
}}
"""
MESH = """stg.mesh @pod[node = 2, cp = {cp}, tp = {tp}]
  stg.strategy @ring[mesh = @pod] {{
    stg.split[S, over = {over}]
    stg.split[(H, G), over = tp]
    stg.ring[S, order = {order}]
    stg.optimizer[none]
  }}"""
GRADIENTS = "infer-shapes,apply-strategy,differentiate,eliminate-dead-code"


@pytest.mark.parametrize("order", ["zigzag", "plain"])
@pytest.mark.parametrize("causal", ["", "[causal]"])
@pytest.mark.parametrize(
    ("over", "cp", "tp"), [("cp", 4, 1), ("(node, cp)", 3, 1), ("(cp, node)", 2, 2), ("cp", 3, 2)]
)
def test_packed_keys_and_values_over_any_axes(
    over: str, cp: int, tp: int, causal: str, order: str
) -> None:
    one = compiled(PACKED.format(mesh="", causal=causal), GRADIENTS)
    inputs = inputs_of(one, 4)
    mesh = MESH.format(over=over, cp=cp, tp=tp, order=order)
    module = compiled(PACKED.format(mesh=mesh, causal=causal), f"{GRADIENTS},{PLACE}")
    assert len(operations(module, "stg.shift")) == 4
    for x, y in zip(run_numeric(one, inputs), run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10)
