"""Copies of experts change nothing that a server computes, and ranks hold what is published."""

from __future__ import annotations

import json
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from stagec.ir_spec.strategy.redundant_experts import CopiesRule
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.passes.serving.copy_experts import copy_experts
from stagec.sharding.strategy import read_strategy
from tests.configurations import small
from tests.served import step_modules
from tests.support import DEEPSEEK, LONG, MIXTRAL, crossed, stagec, tiny_options

CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"dp": 2, "ep": 2}),
    (4, {"dp": 2, "ep": 4, "tp": 2, "etp": 1, "dp_attention": True}),
    (2, {}),
    (4, {"dp": 4, "ep": 4}),
)


def logits_of(job: JobOptions, past: int, inputs: dict[str, Array], copies: int) -> Array:
    """The logits of a step of decode on these numbers; new ones are added, and of what has a
    dimension of all experts the copies are those of the first ones."""
    stated, ready = step_modules(job, "decode", 1, past)
    copy_experts(stated, job.redundant_experts)
    args = stated.main.body.args
    fresh = random_inputs(args, stated.env, 5)
    for name, value in fresh.items():
        known: Array = inputs.setdefault(name, value)
        other = [d for d in range(value.ndim) if known.shape[d] != value.shape[d]]
        fresh[name] = known
        for d in other:
            first = known.take(range(copies), axis=d)
            fresh[name] = np.concatenate([known, first], axis=d)
    actual = run_named(ready, ready.env, fresh)
    logits = stated.main.body.terminator.operands[0].name
    return actual[logits]


@crossed(model=[MIXTRAL, DEEPSEEK], case=CASES)
def test_copies_compute_what_their_experts_do(model: str, case: tuple[int, dict[str, Any]]) -> None:
    """Four experts of which two or all have copies; token 1 goes to experts 2 and 3 of the former,
    token 2 to copies of 0 and 1, which are experts 4 and 5."""
    copies, options = case
    plain = tiny_options(model, capacity_factor=Fraction(2))
    kept = 4 + copies
    job = tiny_options(
        model, capacity_factor=Fraction(kept, 2), redundant_experts=copies, **options
    )
    for past in (1, 2):
        inputs: dict[str, Array] = {}
        expected = logits_of(plain, past, inputs, copies)
        actual = logits_of(job, past, inputs, copies)
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"dp": 2, "ep": 2}])
def test_experts_without_weights_have_no_copies(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of 4 experts with weights 2 have copies, behind which 2 without weights are numbered: token 1
    goes to experts 2 and 3, token 6 to copies of 0 and 1, token 11 to those without weights."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small("longcat_flash", n_routed_experts=4)))
    sizes = {"B": 4}
    plain = JobOptions(str(config), sizes=sizes, capacity_factor=Fraction(6))
    job = plain.changed(capacity_factor=Fraction(9), redundant_experts=2, **options)
    for past in (1, 6, 11):
        inputs: dict[str, Array] = {}
        expected = logits_of(plain, past, inputs, 2)
        actual = logits_of(job, past, inputs, 2)
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_copies_are_not_of_the_model(tmp_path: Path) -> None:
    """Model FLOPs are those without copies; a rank has their weights."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "longcat_flash"}))
    step = (str(config), "--serve", "decode", "--batch", "64", "--context", "100", "--ep", "8")
    plain, copied = (
        analysed(*step, "--tp", "8", *more) for more in ((), ("--redundant-experts", "8"))
    )
    assert plain["model_flops"] == copied["model_flops"]
    rows = [{op["op"]: op["flops"] for op in each["serving"]["ops"]} for each in (plain, copied)]
    assert rows[0] == rows[1]
    expert = 28 * 3 * 6144 * 2048 * BYTES
    more = copied["serving"]["weight_bytes"] - plain["serving"]["weight_bytes"]
    assert 0 <= more - expert < 28 * 6144 * BYTES


@pytest.mark.parametrize("ep", [2, 4])
def test_groups_divide_the_experts_of_the_model(ep: int) -> None:
    """Routers choose groups among the experts of the model, whatever their copies: 8 groups divide
    256 experts, but not 260."""
    step = ("deepseek-v3", "--serve", "decode", "--batch", "8", "--context", "100", "--dp", "4")
    figures = analysed(*step, "--ep", str(ep), "--redundant-experts", "4")
    assert figures["model_flops"] == analysed(*step, "--ep", str(ep))["model_flops"]


def analysed(*words: str) -> dict[str, Any]:
    ran = stagec("analyze", *words, "--json")
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


#: DeepSeek-V3: layers with experts, width, width of an expert; bytes of an element.
LAYERS, D, M, BYTES = 58, 7168, 2048, 2


@pytest.mark.parametrize(("ranks", "copies", "mine"), [(32, 32, 9), (144, 32, 2), (320, 64, 1)])
def test_ranks_hold_the_published_number_of_experts(ranks: int, copies: int, mine: int) -> None:
    """Prefill on 32 ranks 9 of 288, decode on 144 ranks 2 of 288, on 320 ranks 1 of 320 (DeepSeek,
    open-infra-index, day 6; arXiv 2412.19437, section 3.4); the router chooses among 256."""
    step = ("deepseek-v3", "--serve", "decode", "--batch", str(8 * ranks), "--context", "100")
    split = ("--dp", str(ranks), "--ep", str(ranks))
    actual = analysed(*step, *split, "--redundant-experts", str(copies))
    other = analysed(*step, "--dp", "256", "--ep", "256", "--set", "E=256", "--batch", "2048")
    more = actual["serving"]["weight_bytes"] - other["serving"]["weight_bytes"]
    assert more == (mine - 1) * LAYERS * 3 * D * M * BYTES
    ops = {op["op"]: op for op in actual["serving"]["ops"]}
    assert ops["layers/moe/logits"]["flops"] == 2 * 8 * D * 256 * LAYERS
    # tokens of a rank are those of the group: each expert takes its share of all copies
    assert ops["layers/moe/experts/ys"]["flops"] == 2 * 8 * 8 * D * M * LAYERS


@pytest.mark.parametrize(("preset", "mine"), [("prefill", 9), ("decode", 1)])
def test_presets_hold_the_published_number_of_experts(preset: str, mine: int) -> None:
    module = JobBuilder(JobOptions("", preset=f"deepseek-v3-{preset}")).module
    mesh = module.mesh
    assert mesh is not None
    copies = read_strategy(module).one(CopiesRule).count
    assert module.env["E"] + copies == mine * prod(n or 0 for n in mesh.sizes.values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mixtral-8x7b",), "--redundant-experts needs a step of serving"),
        (("llama3-8b", "--serve", "decode", "--context", "9"), "the model has no experts"),
        (
            ("mixtral-8x7b", "--serve", "decode", "--context", "9"),
            "9 copies are more than the 8 experts",
        ),
    ],
)
def test_what_cannot_be_is_reported(words: tuple[str, ...], says: str) -> None:
    ran = stagec("analyze", *words, "--redundant-experts", "9")
    assert ran.code == 1
    assert says in ran.err


def test_a_text_of_training_cannot_have_copies(tmp_path: Path) -> None:
    file = tmp_path / "s.stg"
    file.write_text("stg.strategy @s {\n  stg.redundant_experts[count = 1]\n}\n")
    ran = stagec("analyze", "mixtral-8x7b", str(file))
    assert ran.code == 1
    assert "s.stg:2:3: error: redundant experts need a step of serving" in ran.err


@LONG
def test_passes_after_it_keep_what_a_step_computes() -> None:
    words = ("mixtral-8x7b", "--set", "L=1", "--serve", "decode", "--context", "4", "--batch", "8")
    split = ("--dp", "2", "--ep", "2", "--redundant-experts", "4", "--check-numerics")
    ran = stagec("analyze", *words, *split)
    assert ran.code == 0, ran.err
