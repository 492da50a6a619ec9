"""Ring attention: the sharded step computes what one device computes, in every order and with
every other kind of parallelism; its traffic and work are those of the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.expr import const, symbol
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array
from tests.support import (
    LLAMA,
    PLACE,
    STEP,
    compiled,
    crossed,
    dim,
    each_value,
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


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), label))
def test_a_ring_equals_one_device(row: dict[str, Any]) -> None:
    """Loss, updated parameters and optimizer state, which hold every gradient."""
    options = dict(row)
    axes = options.pop("axes")
    inputs, expected = plain(row["param_dtype"])
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", **axes, **options, sizes=SIZES)
    assert operations(module, "stg.collective_permute")
    names = [v.name for v in module.main.body.terminator.operands]
    actual = run_numeric(module, inputs)
    for name, x, y in zip(names, expected, actual, strict=True):
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


@crossed(
    axes=[("cp", 4, 1), ("(node, cp)", 3, 1), ("(cp, node)", 2, 2), ("cp", 3, 2)],
    causal=["", "[causal]"],
    order=["zigzag", "plain"],
)
def test_packed_keys_and_values_over_any_axes(
    axes: tuple[str, int, int], causal: str, order: str
) -> None:
    over, cp, tp = axes
    one = compiled(PACKED.format(mesh="", causal=causal), GRADIENTS)
    inputs = inputs_of(one, 4)
    mesh = MESH.format(over=over, cp=cp, tp=tp, order=order)
    module = compiled(PACKED.format(mesh=mesh, causal=causal), f"{GRADIENTS},{PLACE}")
    assert len(operations(module, "stg.collective_permute")) == 4
    for x, y in zip(run_numeric(one, inputs), run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", ["zigzag", "plain"])
def test_a_wrong_message_is_seen(order: str) -> None:
    """In the other direction, or a place too far, any of them changes what is computed."""
    inputs, expected = plain("bf16")
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", cp=4, cp_order=order, sizes=SIZES)
    shifts = operations(module, "stg.collective_permute")
    assert len(shifts) == 4  # forward; backward: keys and values, gradients, gradients home
    for op in shifts:
        for by in (2, 3, 4):
            op.attrs["by"] = const(by)
            actual = run_numeric(module, inputs)
            assert not all(
                np.allclose(x, y, rtol=1e-9, atol=1e-9)
                for x, y in zip(expected, actual, strict=True)
            ), f"{op!r} by {by}"
        op.attrs["by"] = const(1)
    np.testing.assert_allclose(run_numeric(module, inputs)[0], expected[0], rtol=1e-10)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_holds_a_chunk_from_either_end(ranks: int) -> None:
    """Rank i of n has chunks i and 2n-1-i of 2n; ranks of another axis share what it has."""
    chunks = np.split(np.arange(24), 2 * ranks)
    ordered = {"S": ("cp",)}
    for i in range(ranks):
        for j in range(2):
            ctx = NumericContext(
                {"S": 24, "cp": ranks, "tp": 2}, {"cp": i, "tp": j}, zigzag=ordered
            )
            mine = np.concatenate([chunks[i], chunks[2 * ranks - 1 - i]])
            assert list(ctx.positions(dim(symbol("S"), "cp"))) == mine.tolist()
            both = ctx.positions(dim(symbol("S"), "cp", "tp"))
            assert list(both) == np.split(mine, 2)[j].tolist()
            assert list(ctx.positions(dim(symbol("S"), "tp"))) == list(range(12 * j, 12 * j + 12))
            assert ctx.moved(("cp",), 1).coords == {"cp": (i + 1) % ranks, "tp": j}


STAGED = f"{STEP},partition,stages,units"


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zbv", "cp_order": "plain"},
        {"schedule": "1f1b", "tp": 2, "sp": True, "recompute": "full"},
        {"schedule": "zbv", "dp": 2, "zero": 1},
    ],
    ids=str,
)
def test_rings_in_pipeline_stages(options: dict[str, Any]) -> None:
    sizes = {**SIZES, "L": 4}
    alone = tiny_module(LLAMA, STEP, sizes=sizes)
    inputs = inputs_of(alone, 2)
    expected = run_named(alone, alone.env, inputs)
    module = tiny_module(LLAMA, STAGED, sizes=sizes, pp=2, cp=2, microbatches=4, **options)
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    (_, loss), *rest = actual.items()
    np.testing.assert_allclose(loss, next(iter(expected.values())), rtol=1e-10)
    for name, x in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered updates of ZeRO-1
        np.testing.assert_allclose(x, theirs, rtol=1e-10, atol=1e-10, err_msg=name)
