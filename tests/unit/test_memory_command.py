"""`stagec memory`: the table, the limit with what would fit, the files."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.footprint import timelines, worst_moments
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.memory.lifetimes import Buffer
from stagec.memory.step import turns
from stagec.memory.timeline import Timeline
from stagec.schedule.registry import SCHEDULES
from tests.support import analyse, parse_expr, stagec

SMALL = ("llama3-8b", "--set", "L=4", "--tp", "2", "--pp", "2")
OPTIONS: dict[str, Any] = {"sizes": {"L": 4}, "tp": 2, "pp": 2}


def found(*more: str | Path) -> dict[str, Any]:
    ran = stagec("memory", *SMALL, "--json", *more)
    assert ran.code == 0, ran.err
    result: dict[str, Any] = json.loads(ran.out)
    return result


def test_it_agrees_with_analyze() -> None:
    """Two ways to the peak: what each buffer adds, and the expressions of the plan."""
    for entry, other in zip(
        found()["classes"], analyse("llama3-8b", **OPTIONS)["classes"], strict=True
    ):
        assert (entry["name"], entry["ranks"]) == (other["name"], other["count"])
        assert entry["peak"] == sum(entry["categories"].values()) == other["memory"]["peak"]
        for name in ("parameters", "gradients", "optimizer"):
            assert entry["categories"][name] == other["memory"][name]
        sizes = [held["bytes"] for held in entry["largest"]]
        assert sizes == sorted(sizes, reverse=True)
        assert all(re.fullmatch(r"llama\.stg:\d+", held["line"]) for held in entry["largest"])


@pytest.mark.parametrize(
    "more",
    [{}, {"dp": 2, "zero": 3}, {"schedule": "zb-h1", "microbatches": 8}, {"schedule": "gpipe"}],
    ids=str,
)
def test_the_worst_moment_in_symbols(more: dict[str, Any]) -> None:
    """The expression comes to the peak, at other sizes too where the same moment is the worst."""

    def worst(**sizes: int) -> tuple[Mapping[int, dict[str, Any]], Module]:
        options: dict[str, Any] = {**OPTIONS, "sizes": {"L": 8, "B": 16, **sizes}, **more}
        module = JobBuilder(JobOptions("llama3-8b", **options)).lower("plan-memory")
        return worst_moments(module), module

    here, module = worst()
    other, larger = worst(S=16384, L=16)
    assert here
    for stage, entry in here.items():
        expression = parse_expr(entry["expression"])
        assert evaluate(expression, module.env) == entry["peak"]
        assert other[stage]["at"] == entry["at"]
        assert evaluate(expression, larger.env) == other[stage]["peak"]


def test_without_sizes_there_is_no_worst_moment() -> None:
    shown = json.loads(stagec("analyze", *SMALL, "--symbolic", "--json").out)["classes"]
    assert [c["worst"] for c in shown] == [None, None]
    shown = json.loads(stagec("analyze", *SMALL, "--symbolic", "--json", "--set", "B=8").out)
    peaks = [c["worst"]["peak"] for c in shown["classes"]]
    again = found("--set", "B=8")["classes"]
    assert peaks == [c["peak"] for c in again]


def test_analyze_names_the_same_worst_moment() -> None:
    ran = stagec("analyze", *SMALL, "--json")
    shown = json.loads(ran.out)["classes"]
    for entry, other in zip(found()["classes"], shown, strict=True):
        assert {n: entry[n] for n in other["worst"]} == other["worst"]
        assert other["worst"]["peak"] == other["memory"]["peak"]
    assert re.search(r"%gu +stash +llama\.stg:\d+ .* x 2 ", stagec("analyze", *SMALL).out)


def test_equal_buffers_of_layers_and_microbatches_are_one_line() -> None:
    """4 layers on 2 stages: 2 layers of 2 microbatches on the first one, of one on the last."""
    counts = [
        {held["name"]: held["count"] for held in entry["largest"]} for entry in found()["classes"]
    ]
    assert [c["gu"] for c in counts] == [4, 2]


def test_the_table_says_where_the_largest_buffers_come_from() -> None:
    ran = stagec("memory", *SMALL, "--fit", "caching")
    assert ran.code == 0
    assert re.search(r"%gu +stash +llama\.stg:\d+", ran.out)
    assert "caching: reserved" in ran.out


def test_a_limit_that_holds() -> None:
    assert stagec("memory", *SMALL, "--limit", "1TiB").code == 0


def test_a_limit_that_does_not_hold_says_what_would_fit() -> None:
    """What it says fits, does fit."""
    peaks = [c["peak"] for c in found()["classes"]]
    ran = stagec("memory", *SMALL, "--limit", f"{max(peaks) - 2**30}")
    assert ran.code == 1
    assert "stage1 needs" in ran.err
    assert "most of it is" in ran.err
    fits = [line.split("  ")[1].strip() for line in ran.err.splitlines() if line.endswith("  fits")]
    assert "--recompute full" in fits
    assert "--zero 1" not in ran.err, "there is nothing to shard over"
    again = found("--recompute", "full")
    assert max(c["peak"] for c in again["classes"]) <= max(peaks) - 2**30


def test_nothing_fits() -> None:
    ran = stagec("memory", *SMALL, "--limit", "1MB")
    assert ran.code == 1
    assert "no single change fits" in ran.err


@pytest.mark.parametrize("limit", ["80", "80GiB", "1.5TB", "80B"])
def test_sizes(limit: str) -> None:
    assert stagec("memory", *SMALL, "--limit", limit).code in (0, 1)


@pytest.mark.parametrize("limit", ["", "0", "80Gi", "-1", "1e9", "x" * 99, "80 GiBs"])
def test_what_is_no_size(limit: str) -> None:
    ran = stagec("memory", *SMALL, "--limit", limit)
    assert ran.code == 2
    assert "expects a size such as 80GiB" in ran.err


def test_an_open_size_is_told(tmp_path: Path) -> None:
    text = tmp_path / "open.stg"
    text.write_text(
        "stg.module @m {\n  stg.symbols[B, D]\n  stg.func @f(%x: f32[B, D], %w: f32[D, D | param]) "
        '{\n    %y = stg.einsum["bd,de->be"](%x, %w)\n    stg.return(%y)\n  }\n}\n'
    )
    ran = stagec("memory", text, "--pipeline", "infer-shapes,propagate-sharding,"
                 "insert-collectives,plan-memory")  # fmt: skip
    assert ran.code == 1
    assert "no value for D" in ran.err


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = found("--html", page)
    text = page.read_text("utf-8")
    assert not re.search(r"https?://|src=|href=|@import", text)
    match = re.search(r"const DATA=(.*);\n", text)
    assert match is not None
    data = json.loads(match[1])
    peak = max(c["peak"] for c in result["classes"])
    assert max(sum(point[2]) for point in data["points"]) == peak
    assert any("llama.stg:" in point[0] for point in data["points"])


def test_the_snapshot_replays_to_the_peak(tmp_path: Path) -> None:
    """Every free is of what lives at that address; the most bytes are the peak."""
    file = tmp_path / "snapshot.pickle"
    result = found("--snapshot", file, "--stage", "1")
    (trace,) = pickle.loads(file.read_bytes())["device_traces"]
    live: dict[int, int] = {}
    most = 0
    for entry in trace:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        most = max(most, sum(live.values()))
    assert most == result["classes"][1]["peak"]


def test_a_stage_that_is_not_there() -> None:
    ran = stagec("memory", *SMALL, "--stage", "7", "--html", "/dev/null")
    assert ran.code == 2
    assert "the stages are 0 to 1" in ran.err


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [8, 16])
def test_stashes_in_flight(name: str, microbatches: int) -> None:
    """The copies of a layer's activation that a rank holds at once: the closed form, in
    microbatches, times the layers of each on that rank (of one copy of the model)."""
    p, v = 4, SCHEDULES[name].default_chunks
    layers = 4 * p * v
    mine = layers // p
    form = SCHEDULES[name].closed_form(p, microbatches, v)
    options = JobOptions(
        "gpt3-175b", sizes={"L": layers}, pp=p, microbatches=microbatches, schedule=name
    )
    module = JobBuilder(options).lower("plan-memory")
    for stage, func, timeline in timelines(module):
        planner = Timeline.planner(module, func, 1)
        most = max(
            sum(n * copies(planner.held(s), module) for s, n in after.items())
            for turn in turns(timeline.order, planner.regions)
            for after in turn.after()
        )
        assert form.in_flight is not None
        assert most == form.in_flight[stage] * mine, stage


def copies(held: frozenset[Buffer], module: Module) -> int:
    """How many outputs of a layer's activation function are among these buffers."""
    return sum(evaluate(b.copies, module.env) for b in held if b.value.name == "m")
