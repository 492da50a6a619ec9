"""Context parallelism, hybrid sharding and recompute: same numbers, traffic as in the formulas.

The plain program is the model on one device; traffic is that of one rank and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.support import (
    GPT,
    LLAMA,
    PLACE,
    STEP,
    analyse,
    each_value,
    inputs_of,
    pairwise,
    run_numeric,
    stagec,
    tiny_module,
)

FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "cp_mode": ("all-gather", "ulysses"),
    "axes": (
        {"cp": 2},
        {"cp": 2, "tp": 2},
        {"cp": 2, "dp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "cp": 2},
        {"tp": 2, "dp": 2},
    ),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full", "full-replay"),
    "microbatches": (1, 2),
    "tp_inputs": ("regather", "save-gathered"),
    "cp_inputs": ("regather", "save-gathered"),
}


@cache
def plain(model: str) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(model, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


def label(row: Mapping[str, Any]) -> str:
    axes = ",".join(f"{a}{n}" for a, n in row["axes"].items())
    return "-".join([axes, *(f"{v}" for n, v in row.items() if n != "axes")])


def grid() -> list[dict[str, Any]]:
    """All pairs of options; Ulysses is for models with fused attention."""
    rows = list(pairwise(FACTORS))
    for row in rows:
        if row["model"] == GPT and "cp" in row["axes"]:
            row["cp_mode"] = "all-gather"
        if "cp" not in row["axes"] or row["cp_mode"] != "all-gather":
            row["cp_inputs"] = "regather"
    return rows


@pytest.mark.parametrize("row", each_value(grid(), label))
def test_a_step_on_a_mesh_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    model, axes = options.pop("model"), options.pop("axes")
    inputs, expected = plain(model)
    module = tiny_module(model, f"{STEP},{PLACE}", **axes, **options)
    names = [v.name for v in module.main.body.terminator.operands]
    actual = run_numeric(module, inputs)
    for name, x, y in zip(names, expected, actual, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


SIZES = {"L": 3, "B": 2, "S": 4096}
B, S, L, H, G, K, D, F = 2, 4096, 3, 32, 8, 128, 4096, 14336


def moved(op: str, over: list[str], phase: str, **options: Any) -> tuple[int, int]:
    """Calls and bytes of the collectives of one kind, over these axes, in a phase."""
    (entry,) = analyse(LLAMA, sizes=SIZES, **options)["classes"]
    rows = [
        r
        for r in entry["collectives"]
        if r["op"] == op and r["over"] == over and r["phase"] == phase
    ]
    return sum(r["count"] for r in rows), sum(r["bytes"] for r in rows)


def test_ulysses_exchanges_four_activations_each_way() -> None:
    """Queries, keys, values and the result, 1/N of each forward, the same backward."""
    one_layer = 2 * B * S * K * (2 * H + 2 * G) // 4
    for phase in ("forward", "backward"):
        actual = moved("all_to_all", ["cp"], phase, cp=4, cp_mode="ulysses")
        assert actual == (4 * L, L * one_layer)


WHOLE = 2 * 2 * B * S * G * K


def gathered(phase: str, **more: Any) -> tuple[int, int]:
    return moved("all_gather", ["cp"], phase, cp=4, cp_mode="all-gather", **more)


def test_gathered_context_moves_keys_and_values_twice() -> None:
    """Forward and again backward, as Transformer Engine and PyTorch do, and once more where forward
    is computed again; their gradients are scattered."""
    for phase in ("forward", "backward"):
        assert gathered(phase) == (2 * L, L * WHOLE)
        assert gathered(phase, recompute="full") == (2 * L, L * WHOLE)
    assert gathered("recompute", recompute="full") == (2 * L, L * WHOLE)
    scattered = moved("reduce_scatter", ["cp"], "backward", cp=4, cp_mode="all-gather")
    assert scattered == (2 * L, L * WHOLE)


@pytest.mark.parametrize("tp_inputs", ["regather", "save-gathered"])
def test_saved_keys_and_values_are_stashed_whole(tp_inputs: str) -> None:
    """A rank keeps 4 parts in place of its own, whatever becomes of the inputs of products."""
    more = {"tp": 2, "sp": True, "tp_inputs": tp_inputs}
    assert gathered("backward", **more) == (2 * L, L * WHOLE // 2)
    assert gathered("backward", **more, cp_inputs="save-gathered") == (0, 0)

    def stash(**inputs: str) -> int:
        actual = analyse(LLAMA, sizes=SIZES, cp=4, cp_mode="all-gather", **more, **inputs)
        return int(actual["classes"][0]["memory"]["stash"])

    kept = L * WHOLE // 2
    assert stash(cp_inputs="save-gathered") - stash() == kept - kept // 4


def test_parameters_are_sharded_over_data_and_context() -> None:
    options = {"dp": 2, "cp": 2, "cp_mode": "all-gather", "zero": 3}
    parameters = analyse(LLAMA, sizes=SIZES)["parameters"]
    assert moved("all_gather", ["dp", "cp"], "forward", **options) == (L + 1, 2 * parameters)


def test_hybrid_sharding_reduces_the_shard_over_replicas() -> None:
    options = {"dp_replicate": 2, "dp_shard": 4, "zero": 3, "sizes": {**SIZES, "B": 8}}
    parameters = analyse(LLAMA, sizes=SIZES)["parameters"]
    (entry,) = analyse(LLAMA, **options)["classes"]
    rows = {(r["op"], tuple(r["over"]), r["phase"]): r for r in entry["collectives"]}
    scattered = rows["reduce_scatter", ("dp_shard",), "gradient"]
    reduced = rows["all_reduce", ("dp_replicate",), "gradient"]
    assert (scattered["count"], scattered["bytes"]) == (L + 1, 4 * parameters)
    assert (reduced["count"], reduced["bytes"]) == (L + 1, parameters)


def test_full_replay_computes_the_blocks_again() -> None:
    (entry,) = analyse(LLAMA, sizes=SIZES, recompute="full-replay")["classes"]
    weights = D * K * (2 * H + 2 * G) + 3 * D * F
    attention = 4 * B * S * S * H * K
    assert entry["matmul_flops"]["recompute"] == L * (2 * weights * B * S + attention)


def test_full_recompute_leaves_out_what_backward_does_not_need() -> None:
    """The last matmul of a block and its reduction, as an early-stopping checkpoint does."""
    options = {"sizes": SIZES, "tp": 2, "sp": True}
    (replay,) = analyse(LLAMA, recompute="full-replay", **options)["classes"]
    (full,) = analyse(LLAMA, recompute="full", **options)["classes"]
    spared = replay["matmul_flops"]["recompute"] - full["matmul_flops"]["recompute"]
    assert spared == L * 2 * B * S * D * F // 2
    scattered = moved("reduce_scatter", ["tp"], "recompute", recompute="full", tp=2, sp=True)
    assert scattered == (L, L * 2 * B * S * D)


def test_only_block_inputs_are_stashed_under_full_recompute() -> None:
    """2sbh bytes a layer (arXiv 2205.05198, table 2)."""
    layers = [analyse(GPT, sizes={"L": n, "B": 1}, recompute="full") for n in (4, 5)]
    four, five = (r["classes"][0]["memory"]["stash"] for r in layers)
    assert five - four == 2 * 2048 * 12288


def test_selective_recompute_stashes_34sbh() -> None:
    """34sbh/t bytes a layer with sequence parallelism (arXiv 2205.05198, table 2)."""
    options = {"tp": 8, "sp": True, "recompute": "selective"}
    layers = [analyse(GPT, sizes={"L": n, "B": 1}, **options) for n in (4, 5)]
    four, five = (r["classes"][0]["memory"]["stash"] for r in layers)
    assert five - four == 34 * 2048 * 12288 // 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cp", "2", "--cp-mode", "ulysses", "--cp-order", "plain"], "needs --cp-mode ring"),
        (["--cp", "3"], "S = 8192 does not divide over cp = 3"),
        (["--cp", "3", "--set", "S=8193"], "S = 8193 does not divide over 2*cp = 6"),
        (["--dp", "2", "--dp-shard", "2"], "cannot be used with"),
        (["--mesh", "dp=2", "--cp", "2", "--cp-mode", "ulysses"], "cannot be used together"),
        (["--cp", "8", "--tp", "2", "--cp-mode", "ulysses"], "G = 8 does not divide"),
    ],
)
def test_what_cannot_be(options: list[str], message: str) -> None:
    assert_refused(LLAMA, options, message)


def test_unfused_attention_has_nothing_to_pass_round() -> None:
    assert_refused(GPT, ["--cp", "2"], "the model has no fused attention")


def test_unfused_attention_has_nothing_to_exchange() -> None:
    assert_refused(GPT, ["--cp", "2", "--cp-mode", "ulysses"], "nothing to exchange")


def assert_refused(model: str, options: list[str], message: str) -> None:
    ran = stagec("compile", model, *options, "--dry-run")
    assert ran.code == 1
    assert message in ran.err
    assert "help:" in ran.err
