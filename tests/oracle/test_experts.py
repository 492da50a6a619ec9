"""Mixture of experts on a mesh: same numbers as on one device, traffic as in the formulas.

The load is balanced, so sharded and plain programs choose the same experts and drop nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.support import (
    DEEPSEEK,
    DEEPSEEK_MTP,
    DEEPSEEK_V2,
    MIXTRAL,
    PLACE,
    QWEN,
    STEP,
    analyse,
    crossed,
    each_value,
    inputs_of,
    operations,
    pairwise,
    run_numeric,
    stagec,
    tiny_module,
)

AXES: Sequence[Mapping[str, int]] = (
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "ep": 2, "tp": 2},
    {"dp": 4, "ep": 2, "tp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "ep": 4, "tp": 2, "etp": 1},
    {"dp": 4, "ep": 4, "tp": 2, "etp": 1},
    {"dp": 2, "ep": 2, "tp": 2, "etp": 1},
    {"dp": 2, "tp": 2, "etp": 1},
    {"dp": 2, "ep": 2, "cp": 2},
    {"dp": 2, "ep": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
)
#: Meshes with all kinds of axes, for models that differ in what is around the experts.
MIXED: Sequence[Mapping[str, int]] = (
    {"dp": 4, "ep": 2, "tp": 2},
    {"dp": 4, "ep": 4, "tp": 2, "etp": 1},
    {"dp": 2, "ep": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
)
#: Meshes that split the tokens over the ranks that split each expert, or experts between them.
SPLIT: Sequence[Mapping[str, int]] = (
    {"tp": 2},
    {"dp": 2, "ep": 2, "tp": 2},
    {"tp": 4},
    {"dp": 2, "tp": 2},
    {"tp": 2, "etp": 1},
    {"cp": 2, "tp": 2},
    {"pp": 2, "tp": 2},
)
FACTORS: Mapping[str, Sequence[Any]] = {
    "axes": AXES,
    "sp": (True, False),
    "zero": (0, 1, 2, 3),
    "cp_mode": ("all-gather", "ulysses"),
    "microbatches": (1, 2),
    "recompute": ("none", "selective", "full", "full-replay"),
    "tp_inputs": ("regather", "save-gathered"),
    "capacity_factor": (Fraction(1), Fraction(2)),
}
MODELS = (MIXTRAL, QWEN, DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_MTP)


def grid() -> list[dict[str, Any]]:
    """All pairs of options; whole experts come with sequence parallelism. Models take turns."""
    rows = list(pairwise(FACTORS))
    for i, row in enumerate(rows):
        row["sp"] = row["sp"] or row["axes"].get("etp") == 1
        row["model"] = MODELS[i % len(MODELS)]
    return rows


def label(row: Mapping[str, Any]) -> str:
    axes = ",".join(f"{a}{n}" for a, n in row["axes"].items())
    return "-".join([axes, *(str(v) for n, v in row.items() if n != "axes")])


@cache
def plain(model: str) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(model, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


def assert_same(model: str, options: Mapping[str, Any]) -> None:
    inputs, expected = plain(model)
    module = tiny_module(model, f"{STEP},{PLACE}", **options)
    names = [v.name for v in module.main.body.terminator.operands]
    actual = run_numeric(module, inputs)
    for name, x, y in zip(names, expected, actual, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("row", each_value(grid(), label))
def test_a_step_on_a_mesh_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    model, axes = options.pop("model"), options.pop("axes")
    assert_same(model, {**axes, **options})


@crossed(axes=MIXED, model=MODELS)
def test_every_model_on_mixed_meshes(axes: dict[str, int], model: str) -> None:
    assert_same(model, {**axes, "sp": True, "zero": 3, "cp_mode": "all-gather"})


@crossed(axes=SPLIT, model=MODELS)
def test_rows_left_over_are_where_they_were_filled(axes: dict[str, int], model: str) -> None:
    """Ranks fill rows by their own tokens, so those that take them out count these tokens too."""
    assert_same(model, {**axes, "sp": True, "capacity_factor": Fraction(2)})


#: Meshes whose ranks of experts have all tokens.
GATHERED: Sequence[Mapping[str, Any]] = (
    {"dp": 2, "ep": 4, "tp": 2, "moe_dispatch": "gather"},
    {"tp": 2, "ep": 2, "zero": 1},
    {"dp": 2, "ep": 2, "moe_dispatch": "gather", "microbatches": 2},
    {"dp": 2, "ep": 2, "tp": 2, "etp": 1, "zero": 3},
    {"dp": 2, "ep": 2, "cp": 2, "moe_dispatch": "gather", "cp_mode": "all-gather"},
    {"tp": 4, "ep": 2},
    {"tp": 4, "ep": 2, "cp": 2, "zero": 3, "cp_mode": "all-gather"},
)


@crossed(axes=GATHERED, model=[MIXTRAL, DEEPSEEK])
def test_ranks_of_experts_have_all_tokens(axes: dict[str, Any], model: str) -> None:
    assert_same(model, axes)


def test_tokens_go_to_their_experts_and_come_back() -> None:
    """A wrong combine weight or expert would show here: each expert scales by its own number."""
    module = tiny_module(MIXTRAL, "inline,infer-shapes")
    inputs = inputs_of(module, 5)
    base = float(run_numeric(module, inputs)[0])
    (name,) = (n for n in inputs if n.endswith("/w_down"))
    one = {**inputs, name: inputs[name].copy()}
    one[name][:, 1] *= 1.5
    assert abs(float(run_numeric(module, one)[0]) - base) > 1e-6


# -- traffic: one rank and step, formulas written here ---------------------------------------------

B, S, L, D, E, T, M, V = 16, 1024, 3, 4096, 8, 2, 14336, 32000
H, G, K = 32, 8, 128
SIZES = {"L": L, "B": B, "S": S}
EXPERTS = 3 * E * D * M
DENSE = D * K * (2 * H + 2 * G) + 2 * D + D * E


def rows(model: str = MIXTRAL, **options: Any) -> dict[tuple[str, tuple[str, ...], str], Any]:
    """Calls and bytes by collective, axes and phase."""
    sizes = {**SIZES, **options.pop("sizes", {})}
    (entry,) = analyse(model, sizes=sizes, **options)["classes"]
    return {
        (r["op"], tuple(r["over"]), r["phase"]): (r["count"], r["bytes"])
        for r in entry["collectives"]
        if r["bytes"] > 1 << 20
    }


@pytest.mark.parametrize(("dp", "ep"), [(4, 4), (8, 2), (8, 8)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_are_exchanged_twice_forward_and_twice_backward(
    dp: int, ep: int, recompute: str
) -> None:
    """Dispatch and combine, each tokens * k * D of this rank; recompute does both again."""
    actual = rows(dp=dp, ep=ep, recompute=recompute)
    message = B * S // dp * T * D * 2
    expected = {"forward": (2 * L, 2 * L * message), "backward": (2 * L, 2 * L * message)}
    assert actual["all_to_all", ("ep",), "forward"] == expected["forward"]
    if recompute == "none":
        assert actual["all_to_all", ("ep",), "backward"] == expected["backward"]
    again = [n for (op, _, p), (n, _) in actual.items() if op == "all_to_all" and p != "forward"]
    assert sum(again) == (2 * L if recompute == "none" else 4 * L)


def test_the_capacity_factor_widens_the_exchanges() -> None:
    narrow, wide = rows(dp=4, ep=4), rows(dp=4, ep=4, capacity_factor=Fraction(5, 4))
    for key in (("all_to_all", ("ep",), "forward"), ("all_to_all", ("ep",), "backward")):
        assert wide[key] == (narrow[key][0], narrow[key][1] * 5 // 4)
    rest = {k: v for k, v in narrow.items() if k[0] != "all_to_all"}
    assert rest == {k: v for k, v in wide.items() if k[0] != "all_to_all"}


def test_the_capacity_factor_multiplies_expert_flops() -> None:
    (one,), (two,) = (
        analyse(MIXTRAL, sizes=SIZES, capacity_factor=c)["classes"]
        for c in (Fraction(1), Fraction(2))
    )
    more = two["matmul_flops"]["forward"] - one["matmul_flops"]["forward"]
    assert more == 2 * B * S * T * 3 * D * M * L


def test_gradients_of_experts_are_reduced_over_the_other_data_axes_only() -> None:
    actual = rows(dp=8, ep=4, ddp_bucket=0)
    dense = 4 * (L * DENSE + 2 * V * D + D)
    assert actual["all_reduce", ("dp",), "gradient"] == (1, 4 * L * EXPERTS // 4)
    assert actual["all_reduce", ("dp", "ep"), "gradient"] == (1, dense)


def test_gradients_of_experts_stay_where_they_are_without_other_data_ranks() -> None:
    actual = rows(dp=8, ep=8, ddp_bucket=0)
    dense = 4 * (L * DENSE + 2 * V * D + D)
    assert {k: v for k, v in actual.items() if k[2] == "gradient"} == {
        ("all_reduce", ("ep",), "gradient"): (1, dense)
    }


def test_sharded_parameters_are_gathered_over_their_own_axes() -> None:
    actual = rows(dp=8, ep=4, zero=3)
    dense = 2 * (L * DENSE + 2 * V * D + D)
    assert actual["all_gather", ("dp", "ep"), "forward"] == (L + 1, dense)
    assert actual["all_gather", ("dp",), "forward"] == (L, 2 * L * EXPERTS // 4)
    assert actual["reduce_scatter", ("dp",), "gradient"] == (L, 4 * L * EXPERTS // 4)


def test_state_of_experts_is_spread_over_all_data_ranks() -> None:
    (entry,) = analyse(MIXTRAL, sizes=SIZES, dp=8, ep=4, zero=1)["classes"]
    parameters = L * (EXPERTS + DENSE) + 2 * V * D + D
    assert entry["memory"]["optimizer"] == 12 * parameters // 8
    assert entry["memory"]["parameters"] == 2 * (parameters - L * EXPERTS * 3 // 4)


def test_split_experts_gather_rows_after_the_exchange() -> None:
    """With sequence parallelism each rank exchanges its share of the tokens, as in Megatron-LM."""
    actual = rows(dp=4, ep=4, tp=2, sp=True)
    message = B * S // 4 * T * D * 2
    assert actual["all_to_all", ("ep",), "forward"] == (2 * L, 2 * L * message // 2)
    act = B * S // 4 * D * 2
    gathers = L * (act + message) + act
    assert actual["all_gather", ("tp",), "forward"] == (2 * L + 1, gathers)
    assert actual["reduce_scatter", ("tp",), "forward"] == (2 * L + 1, gathers)


def test_split_experts_gather_rows_without_an_exchange_too() -> None:
    """The rows are reduced, not the tokens: each rank takes out those that it has filled."""
    actual = rows(dp=4, tp=2, sp=True)
    message, act = B * S // 4 * T * D * 2, B * S // 4 * D * 2
    moved = (2 * L + 1, L * (act + message) + act)
    assert actual["all_gather", ("tp",), "forward"] == moved
    assert actual["reduce_scatter", ("tp",), "forward"] == moved


def test_without_sequence_parallelism_the_combined_tokens_are_reduced() -> None:
    """Partial sums pass through the exchange and the combine: one [b, s, D] as in any block."""
    actual = rows(dp=4, ep=4, tp=2)
    act = B * S // 4 * D * 2
    assert actual["all_reduce", ("tp",), "forward"] == (2 * L + 1, (2 * L + 1) * act)


def test_whole_experts_exchange_over_tensor_ranks_instead_of_gathering() -> None:
    split, whole = rows(dp=4, ep=4, tp=2, sp=True), rows(dp=4, ep=8, tp=2, sp=True, etp=1)
    act = B * S // 4 * D * 2
    assert whole["all_gather", ("tp",), "forward"] == (L + 1, (L + 1) * act)
    for phase in ("forward", "backward"):
        together = whole["all_to_all", ("ep", "tp"), phase]
        assert together == split["all_to_all", ("ep",), phase]
    assert {k[1] for k in whole if k[0] == "all_to_all"} == {("ep", "tp")}
    assert ("all_reduce", ("dp",), "gradient") not in whole


# -- DeepSeek-V3: latent attention, dense layers first, shared experts (arXiv 2412.19437) ----------

V3 = {"D": 7168, "H": 128, "Q": 1536, "C": 512, "K": 128, "R": 64, "W": 128, "F": 18432, "M": 2048}
V3_LAYERS, V3_DENSE, V3_E, V3_T, V3_V = 58, 3, 256, 8, 129280


def latent_weights() -> int:
    """Matrices of one layer's attention."""
    d, h, q, c, k, r, w = (V3[n] for n in ("D", "H", "Q", "C", "K", "R", "W"))
    return d * q + q * h * (k + r) + d * (c + r) + c * h * (k + w) + h * w * d


def test_flops_of_deepseek_v3_are_those_of_its_active_parameters() -> None:
    """2 per active weight and token, and the score matrix: S(K + R) and S W for each head."""
    length = 4096
    (entry,) = analyse(DEEPSEEK, sizes={"B": 1})["classes"]
    layers = V3_LAYERS + V3_DENSE
    active = layers * latent_weights() + V3["D"] * V3_V + 3 * V3_DENSE * V3["D"] * V3["F"]
    active += V3_LAYERS * (3 * (V3_T + 1) * V3["D"] * V3["M"] + V3["D"] * V3_E)
    assert 36.5e9 < active + V3["D"] * V3_V < 38e9  # "37B activated", embedding included
    scores = 2 * length * V3["H"] * (V3["K"] + V3["R"] + V3["W"])
    assert entry["matmul_flops"]["forward"] == length * (2 * active + layers * scores)


def test_latents_are_gathered_instead_of_activations() -> None:
    """Under tensor and sequence parallelism: the two latents and the rotated part of keys, the rows
    of experts, and what enters dense and shared feed-forwards and the head."""
    actual = rows(DEEPSEEK, sizes={"L": 2, "B": 4, "S": 1024}, dp=4, ep=4, tp=2, sp=True)
    latents, d = V3["Q"] + V3["C"] + V3["R"], V3["D"]
    per_token = (2 + V3_DENSE) * latents + 2 * (V3_T * d + d) + V3_DENSE * d + d
    calls = (2 + V3_DENSE) * 3 + 2 * 2 + V3_DENSE + 1
    assert actual["all_gather", ("tp",), "forward"] == (calls, 2 * 1024 * per_token)
    act = 1024 * d * 2
    assert actual["all_to_all", ("ep",), "forward"] == (4, 4 * V3_T * act // 2)


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        (["--ep", "4"], "--ep 4 does not divide --dp 1", "choose --ep 1,"),
        (
            ["--dp", "3", "--tp", "8", "--ep", "2"],
            "and is not all of --tp 8",
            "give --ep 8 for whole",
        ),
        (["--tp", "8", "--ep", "3"], "--ep 3 does not divide --dp 1", "--ep among 1, 2, 4"),
        (["--tp", "4", "--ep", "2", "--sp"], "which all need the same tokens", "give --ep 4"),
        (
            ["--tp", "16", "--ep", "2", "--set", "H=16,G=1"],
            "--ep 2 does not divide the 1 key/value heads",
            "--ep among 1, 16",
        ),
        (["--dp", "8", "--ep", "3"], "--ep 3 does not divide --dp 8", "--ep among 1, 2, 4"),
        (
            ["--dp", "16", "--ep", "16"],
            "E = 8 experts do not divide over --ep 16",
            "--ep among 2, 4, 8",
        ),
        (["--tp", "4", "--etp", "2"], "is neither 1 nor the 4 ranks of tp", "choose --etp 1"),
        (
            ["--mesh", "ep=2,tp=4", "--etp", "1"],
            "would send the same tokens several times",
            "add --sp",
        ),
        (["--tp", "4", "--etp", "1"], "each rank would have all experts", "--ep 4, or leave"),
        (
            ["--dp", "4", "--tp", "4", "--etp", "1", "--sp", "--ep", "2"],
            "a multiple of --tp 4",
            "--ep among 4, 8",
        ),
        (["--dp-shard", "4", "--ep", "8"], "--ep 8 does not divide --dp-shard 4", "among 1, 2, 4"),
        (
            ["--cp", "2", "--cp-mode", "all-gather", "--set", "S=6,E=8"],
            "S*T = 12 does not divide over E*cp = 16",
            "a multiple of 16, or --capacity-factor 4/3",
        ),
        (
            ["--tp", "2", "--sp", "--set", "S=6,E=8", "--capacity-factor", "9/8"],
            "9*S*T = 108 does not divide over 8*E*tp = 128",
            "--capacity-factor 4/3",
        ),
        (
            ["--dp", "16", "--tp", "2", "--sp", "--etp", "1", "--ep", "32"],
            "E = 8 experts do not divide over --ep 32",
            "--ep among 2, 4, 8",
        ),
    ],
)
def test_what_cannot_be(options: list[str], message: str, remedy: str) -> None:
    ran = stagec("compile", MIXTRAL, *options, "--dry-run")
    assert ran.code == 1
    assert message in ran.err
    assert remedy in ran.err


@pytest.mark.parametrize("flag", [["--ep", "2"], ["--etp", "1"], ["--capacity-factor", "2"]])
def test_a_dense_model_has_no_experts(flag: list[str]) -> None:
    ran = stagec("compile", "llama3-8b", "--dp", "2", *flag, "--dry-run")
    assert ran.code == 1
    assert f"{flag[0]}: the model has no experts" in ran.err


@pytest.mark.parametrize("factor", ["1/2", "0", "x", "1/0", "1/00", "-1", "1e3"])
def test_a_capacity_factor_is_a_fraction_of_at_least_one(factor: str) -> None:
    ran = stagec("compile", MIXTRAL, f"--capacity-factor={factor}", "--dry-run")
    assert ran.code == 2
    assert "--capacity-factor" in ran.err


def test_the_router_is_on_every_rank() -> None:
    module = tiny_module(MIXTRAL, f"{STEP},{PLACE}", dp=4, ep=2, tp=2, sp=True)
    (router,) = (p for p in module.parameters() if p.is_called("router"))
    assert router.tensor.axes == ()
    exchanges = operations(module, "stg.all_to_all")
    assert {op.names("over") for op in exchanges} == {("ep",)}
