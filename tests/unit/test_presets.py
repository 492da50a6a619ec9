"""Presets: published runs as they are published, read and changed like any other strategy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest

from stagec.api import time_step
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.machines import load_machine
from stagec.models import library, presets
from tests.support import EXHAUSTIVE, LONG, analyse, stagec

#: GPUs, tokens of a global batch, pipeline stages, as published.
PUBLISHED = {
    "llama3-405b-8k": (8192, 16 << 20, 16),
    "llama3-405b-131k": (16384, 16 << 20, 16),
    "deepseek-v3": (2048, 15360 * 4096, 16),
    "megatron-gpt-1t": (3072, 3072 * 2048, 64),
}


#: Of presets that serve: GPUs, and bytes of caches that a token adds on a rank: 2 x 126 layers x 8
#: heads / 8 ranks x 128 x 2 bytes for Llama 3.1 405B, 61 layers x 576 x 2 for DeepSeek-V3.
SERVED = {
    "deepseek-v3-decode": (320, 61 * 576 * 2),
    "deepseek-v3-prefill": (32, 61 * 576 * 2),
    "llama3-405b-decode": (8, 2 * 126 * 128 * 2),
    "qwen3-235b-decode": (8, 2 * 94 * 128 * 2),
    "qwen3-next-decode": (4, 2 * 12 * 256 * 2),
    "gemma-3-decode": (2, 2 * 5 * 2 * 256 * 2),
}


def test_all_are_here() -> None:
    assert presets().keys() == PUBLISHED.keys() | SERVED.keys()
    assert {p.model for p in presets().values()} <= library().keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_ranks_and_batch_are_those_of_the_run(name: str) -> None:
    ranks, tokens, stages = PUBLISHED[name]
    module = JobBuilder(JobOptions("", preset=name)).module
    mesh = module.mesh
    assert mesh is not None
    assert prod(n or 0 for n in mesh.sizes.values()) == ranks
    assert module.env["B"] * module.env["S"] == tokens
    assert mesh.sizes["pp"] == stages


@LONG
@pytest.mark.parametrize("name", SERVED)
def test_a_preset_that_serves(name: str) -> None:
    """Ranks and caches are those counted by hand. What ranks exchange in decode does not depend on
    what is cached: rows of caches stay where they are."""
    ranks, a_token = SERVED[name]
    actual = served(name)
    assert actual["ranks"] == ranks
    assert actual["serving"]["cache_bytes_per_token"] == a_token
    if name.endswith("decode"):
        longer = served(name, "--context", "1500")
        for a, b in zip(actual["classes"], longer["classes"], strict=True):
            assert a["collectives"] == b["collectives"]


@pytest.mark.parametrize("name", SERVED)
def test_hosts_do_not_hold_up_a_preset_that_serves(name: str) -> None:
    """Its step is captured as a graph, so it takes what it takes on a machine with free hosts."""
    machine = load_machine("h800")
    free = machine.changed({"efficiency.host.issue": 0.0})
    steps = [time_step(machine=on, preset=name).step_seconds for on in (machine, free)]
    assert steps[0] == steps[1]


@LONG
def test_a_preset_is_its_model_text_and_step() -> None:
    """Wherever steps are asked for: alone, in a sweep, and step after step."""
    step = ("--serve", "decode", "--batch", "64", "--context", "4000")
    on = ("--machine", "h800", "--no-levers", "--json")
    expected = json.loads(stagec("time", "--preset", "gemma-3-decode", *on).out)
    assert expected == json.loads(stagec("time", "gemma-3-4b", "--tp", "2", *step, *on).out)
    assert expected["serving"] == {"mode": "decode", "tpot_seconds": expected["step_seconds"]}
    (row,) = json.loads(stagec("time", "--sweep", "preset=gemma-3-decode", *on[:2], "--json").out)
    assert row["time"]["step_seconds"] == expected["step_seconds"]
    slow = json.loads(stagec("time", "--preset", "gemma-3-decode", *on, "--no-graphs").out)
    assert slow["step_seconds"] > 2 * expected["step_seconds"]
    steps = stagec("compile", "--preset", "gemma-3-decode", "--steps", "2", "--dry-run")
    assert "decode=64x4001" in steps.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serve", "--prompt", "64", "--machine", "h800"), "is one step of decode"),
        (("time", "--sweep", "preset=deepseek-v3", "--machine", "h800"), "cannot be used together"),
    ],
)
def test_where_a_preset_does_not_fit(words: Sequence[str], expected: str) -> None:
    done = stagec(words[0], "--preset", "gemma-3-decode", *words[1:])
    assert (done.code, expected in done.err) == (1, True), done.err


def served(name: str, *more: str) -> dict[str, Any]:
    ran = stagec("analyze", "--preset", name, *more, "--json")
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


#: Large, and like others but for the sizes; lit tests compile them too.
MORE = ("deepseek-v3", "llama3-405b-131k")


@LONG
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=EXHAUSTIVE if n in MORE else ()) for n in PUBLISHED]
)
def test_it_compiles_with_one_class_for_each_stage(name: str) -> None:
    ranks, _, stages = PUBLISHED[name]
    actual = analyse("", preset=name)
    assert actual["ranks"] == ranks
    assert [c["name"] for c in actual["classes"]] == [f"stage{s}" for s in range(stages)]
    assert sum(c["count"] for c in actual["classes"]) == ranks
    for entry in actual["classes"]:
        received = sum(r["count"] for r in entry["p2p"] if r["dir"] == "recv")
        assert received == entry["nodes"]["recv"] > 0


#: Model FLOPs utilization on H100: arXiv 2407.21783, table 4.
UTILIZATION = {"llama3-405b-8k": 0.43, "llama3-405b-131k": 0.38}


@LONG
@pytest.mark.parametrize("name", UTILIZATION)
def test_steps_take_about_as_long_as_published(name: str) -> None:
    ran = stagec("time", "--preset", name, "--machine", "h100-sxm", "--no-levers", "--json")
    assert json.loads(ran.out)["mfu"] == pytest.approx(UTILIZATION[name], abs=0.02)


@LONG
def test_the_text_of_a_preset_is_a_strategy_file(tmp_path: Path) -> None:
    text = stagec("presets", "llama3-405b-8k").out
    file = tmp_path / "mine.stg"
    file.write_text(text)
    ours = analyse("llama3-405b", strategy=str(file), sizes={"S": 8192, "B": 2048})
    assert ours == analyse("", preset="llama3-405b-8k")


def test_sizes_of_a_preset_can_be_changed() -> None:
    changed = stagec(
        *("analyze", "--preset", "megatron-gpt-1t", "--dp", "2", "--pp", "8"),
        *("--set", "B=1024,L=16", "--json"),
    )
    actual = json.loads(changed.out)
    assert actual["ranks"] == 8 * 2 * 8
    assert len(actual["classes"]) == 8


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "llama3-405b"], "no preset 'llama3-405b'"),
        ([], "no model is given"),
        (["--preset", "deepseek-v3", "--zero", "3"], "both say how to parallelize"),
        (["llama3-8b", "mine.stg", "--preset", "deepseek-v3"], "both give the strategy"),
    ],
)
def test_what_does_not_go_is_reported(argv: list[str], message: str) -> None:
    made = stagec("analyze", *argv)
    assert made.code == 1
    assert message in made.err


def test_the_list() -> None:
    assert all(name in stagec("presets").out for name in PUBLISHED)
    assert [p["name"] for p in json.loads(stagec("presets", "--json").out)] == [*PUBLISHED, *SERVED]
    assert stagec("presets", "nothing").code == 1
