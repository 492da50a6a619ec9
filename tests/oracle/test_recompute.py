"""Recomputation by lists of ops and in some layers only: same numbers, counts as in closed forms.

A model with fewer layers gives what one layer costs with and without recomputation; some layers
recomputed is the mixture of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.text.printer import print_module
from tests.support import (
    GPT,
    LLAMA,
    PLACE,
    STEP,
    analyse,
    assert_same_text,
    compiled,
    crossed,
    each_value,
    inputs_of,
    only_program,
    pairwise,
    parse,
    run_numeric,
    stagec,
    tiny_module,
)

B, S, D, H, G, K, F = 1, 8192, 4096, 32, 8, 128, 14336
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "recompute": ("full", "full-replay", "selective", "einsum", "listed"),
    "some": ({"recompute_layers": 1}, {"recompute_layers": 2}, {"recompute_every": 2}, {}),
    "axes": ({}, {"tp": 2}, {"dp": 2, "tp": 2}),
    "sp": (False, True),
    "zero": (0, 3),
    "microbatches": (1, 2),
    "tp_inputs": ("regather", "save-gathered"),
}
LISTED = {LLAMA: "attention,swiglu,rmsnorm", GPT: "softmax,gelu,layernorm"}


@cache
def plain(model: str) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step of three layers on one device."""
    module = tiny_module(model, STEP, sizes={"L": 3})
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), str))
def test_a_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    model = options.pop("model")
    options |= {**options.pop("some"), **options.pop("axes")}
    if options["recompute"] == "listed":
        options["recompute"] = LISTED[model]
    inputs, expected = plain(model)
    module = tiny_module(model, f"{STEP},{PLACE}", sizes={"L": 3}, **options)
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


def entry(layers: int, **options: Any) -> dict[str, Any]:
    result = analyse(LLAMA, tp=2, sp=True, sizes={"L": layers, "B": B}, **options)
    return dict(result["classes"][0])


def test_listed_ops_are_computed_again_and_not_stashed() -> None:
    """Attention: two products and its result with row statistics; SwiGLU: its result."""
    layers, t = 3, 2
    plain_one, listed = entry(layers), entry(layers, recompute="attention,swiglu")
    attention = 4 * B * S * S * H * K // t
    assert listed["matmul_flops"]["recompute"] == layers * attention
    spared = B * S * (2 * H * K + 4 * H + 2 * F) // t
    assert plain_one["memory"]["stash"] - listed["memory"]["stash"] == layers * spared
    assert [r for r in listed["collectives"] if r["phase"] == "recompute"] == []


def test_a_listed_matmul_takes_its_collectives_with_it() -> None:
    """Backward needs v, gate and up; the rotated q and k are stashed, o and down not needed."""
    layers = 3
    listed = entry(layers, recompute="einsum")
    products = 2 * B * S * D * K * G + 4 * B * S * D * F
    assert listed["matmul_flops"]["recompute"] == layers * products // 2
    again = {
        r["op"]: (r["count"], r["bytes"])
        for r in listed["collectives"]
        if r["phase"] == "recompute"
    }
    assert again == {"all_gather": (2 * layers, 2 * layers * 2 * B * S * D)}


CASES = [
    ("recompute_layers", 1, 1),
    ("recompute_layers", 3, 3),
    ("recompute_layers", 7, 7),
    ("recompute_every", 1, 7),
    ("recompute_every", 2, 3),
    ("recompute_every", 4, 1),
    ("recompute_every", 7, 1),
]


@crossed(case=CASES, policy=("full", "full-replay", "attention"))
def test_some_of_seven_layers(case: tuple[str, int, int], policy: str) -> None:
    """FLOPs, collectives and stash of `replayed` layers that recompute and the others that do
    not."""
    flag, number, replayed = case
    layers = 7
    nothing, everything = entry(layers), entry(layers, recompute=policy)
    actual = entry(layers, recompute=policy, **{flag: number})
    share = layers - replayed
    for table in ("flops", "matmul_flops"):
        assert actual[table]["recompute"] * layers == everything[table]["recompute"] * replayed
        assert actual[table]["backward"] == everything[table]["backward"]
    mixture = nothing["memory"]["stash"] * share + everything["memory"]["stash"] * replayed
    assert actual["memory"]["stash"] * layers == mixture
    again, every = (
        {r["op"]: r["count"] for r in e["collectives"] if r["phase"] == "recompute"}
        for e in (actual, everything)
    )
    assert {k: n for k, n in again.items() if n} == {
        k: n * replayed // layers for k, n in every.items() if replayed
    }


@pytest.mark.parametrize(("flag", "number", "replayed"), CASES)
def test_nodes_are_as_many_as_counted(flag: str, number: int, replayed: int) -> None:
    options = JobOptions(LLAMA, tp=2, sp=True, recompute="full", sizes={"L": 7, "B": 1})
    some: dict[str, Any] = {flag: number}
    options = replace(options, **some)
    nodes = only_program(JobBuilder(options).lower()).nodes
    again = [n for n in nodes if n.phase == "recompute"]
    layers = {int(n.name.split("/L")[1].split("/")[0]) for n in again}
    expected = range(number) if flag == "recompute_layers" else range(number - 1, 7, number)
    assert layers == set(expected) & set(range(7))
    assert len(layers) == replayed
    counted = entry(7, recompute="full", **{flag: number})
    assert sum(n.flops for n in again) == counted["flops"]["recompute"]


def test_backward_waits_for_what_is_recomputed_or_for_forward() -> None:
    options = JobOptions(LLAMA, recompute="full", recompute_layers=1, sizes={"L": 3, "B": 1})
    nodes = {n.name: n for n in only_program(JobBuilder(options).lower()).nodes}
    for layer in range(3):
        user = next(
            n for name, n in nodes.items() if f"backward/L{layer}/layers/swiglu/d_gate_up" in name
        )
        phases = {d.phase for d in user.deps if d.name.endswith("/gate_up")}
        assert phases == {"recompute" if layer == 0 else "forward"}


def test_the_peak_is_that_of_the_worst_layer() -> None:
    """When the first layers are computed again, the stash of the others is gone: the peak is at
    most that of the stash and the head, as without recomputation."""
    mixed = entry(7, recompute="full", recompute_layers=1)["memory"]
    nothing = entry(7)["memory"]
    assert nothing["peak"] - mixed["peak"] == nothing["stash"] - mixed["stash"]
    every = entry(7, recompute="full", recompute_every=7)["memory"]
    assert every["peak"] == mixed["peak"]
    (symbolic,) = analyse(LLAMA, recompute="full", recompute_layers=2, symbolic=True)["classes"]
    assert "min(2, L)" in str(symbolic) or "min(L, 2)" in str(symbolic)


TEXT = """
stg.module @m {
  stg.symbols[B, F, L]
  stg.func @f (%x: bf16[L, B, F], %s: bf16[L, B, F], %z: bf16[B, F]) {
    %y = stg.repeat[count = L, carry = 1, reverse] (%c = %z, %a = %x, %b = %s) {
      %r = stg.recall(%a, %b) : bf16[B, F]
      %n = stg.add(%c, %r) : bf16[B, F]
      stg.yield(%n)
    } : bf16[B, F]
    stg.return(%y)
  }
}
"""


@pytest.mark.parametrize(("attr", "taken"), [("replay_first = 2", 2), ("replay_every = 3", 1)])
def test_recall_takes_one_or_the_other(attr: str, taken: int) -> None:
    text = TEXT.replace("reverse", f"reverse, {attr}").replace("L]", "L = 5]", 1)
    module = compiled(text.replace("[B, F,", "[B = 1, F = 1,"), "infer-shapes")
    (actual,) = run_numeric(
        module, {"x": np.ones((5, 1, 1)), "s": np.zeros((5, 1, 1)), "z": np.zeros((1, 1))}
    )
    assert actual.item() == taken


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recompute", "atention"], "no block of the model has an op 'atention'"),
        (["--recompute", "swiglu,full"], "no block of the model has an op 'full'"),
        (["--recompute-layers", "2"], "no effect without --recompute"),
        (
            ["--recompute", "full", "--recompute-layers", "2", "--recompute-every", "2"],
            "cannot be used together",
        ),
    ],
)
def test_what_cannot_be(flags: list[str], message: str) -> None:
    ran = stagec("analyze", LLAMA, *flags)
    assert message in ran.err
    assert ran.code == (0 if "no effect" in message else 1)


@pytest.mark.long
@pytest.mark.parametrize("some", ["recompute_layers", "recompute_every"])
def test_the_plan_can_be_read_back(some: str) -> None:
    """Sizes of part of a stack print in the form in which they are read."""
    number: dict[str, Any] = {some: 2}
    options = JobOptions(LLAMA, tp=2, sp=True, recompute="full", **number)
    for module in (JobBuilder(options).lower(), JobBuilder(options, symbolic=True).lower()):
        text = print_module(module)
        assert_same_text(print_module(parse(text)), text)
