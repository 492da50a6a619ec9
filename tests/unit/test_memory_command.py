"""`stagec memory`: the table, the limit with what would fit, the files."""

from __future__ import annotations

import json
import pickle
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stagec import job as job_of
from stagec.analysis.footprint import timelines, worst_moments
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.memory.buffers import Buffer
from stagec.memory.step import turns
from stagec.memory.timeline import MemoryTimeline
from stagec.output.tables import bytes_text
from stagec.schedule.registry import SCHEDULES
from stagec.searches.advice import suggestions
from tests.support import LONG, analyse, crossed, parse_expr, stagec

SMALL = ("llama3-8b", "--set", "L=4", "--tp", "2", "--pp", "2")
OPTIONS: dict[str, Any] = {"sizes": {"L": 4}, "tp": 2, "pp": 2}


def actual(*more: str | Path) -> dict[str, Any]:
    ran = stagec("memory", *SMALL, "--json", *more)
    assert ran.code == 0, ran.err
    result: dict[str, Any] = json.loads(ran.out)
    return result


@pytest.mark.parametrize(
    "more", [{}, {"dp": 2, "zero": 1, "ddp_copies": True, "stage_receives": "ahead"}], ids=len
)
def test_it_agrees_with_analyze(more: dict[str, Any]) -> None:
    """Two ways to the peak: what each buffer adds, and the expressions of the plan."""
    words = ("--dp", "2", "--zero", "1", "--ddp-copies", "--stage-receives", "ahead")
    planned, counted = actual(*words if more else ()), analyse("llama3-8b", **OPTIONS, **more)
    for entry, other in zip(planned["classes"], counted["classes"], strict=True):
        assert (entry["name"], entry["ranks"]) == (other["name"], other["count"])
        assert entry["peak"] == sum(entry["categories"].values()) == other["memory"]["peak"]
        for name in ("parameters", "gradients", "optimizer"):
            assert entry["categories"][name] == other["memory"][name]
        sizes = [kept["bytes"] for kept in entry["largest"]]
        assert sizes == sorted(sizes, reverse=True)
        assert all(
            re.fullmatch(r"(llama|blocks/\w+)\.stg:\d+", kept["line"]) for kept in entry["largest"]
        )


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


@LONG
def test_without_sizes_there_is_no_worst_moment() -> None:
    shown = json.loads(stagec("analyze", *SMALL, "--symbolic", "--json").out)["classes"]
    assert [c["worst"] for c in shown] == [None, None]
    shown = json.loads(stagec("analyze", *SMALL, "--symbolic", "--json", "--set", "B=8").out)
    peaks = [c["worst"]["peak"] for c in shown["classes"]]
    again = actual("--set", "B=8")["classes"]
    assert peaks == [c["peak"] for c in again]


@LONG
def test_analyze_names_the_same_worst_moment() -> None:
    ran = stagec("analyze", *SMALL, "--json")
    shown = json.loads(ran.out)["classes"]
    for entry, other in zip(actual()["classes"], shown, strict=True):
        assert {n: entry[n] for n in other["worst"]} == other["worst"]
        assert other["worst"]["peak"] == other["memory"]["peak"]
    assert re.search(
        r"%layers/swiglu/\S* +stash +blocks/swiglu\S* .* x 2 ", stagec("analyze", *SMALL).out
    )


def test_equal_buffers_of_layers_and_microbatches_are_one_line() -> None:
    """4 layers on 2 stages: 2 layers of 2 microbatches on the first one, of one on the last."""
    counts = [
        {kept["name"]: kept["count"] for kept in entry["largest"]} for entry in actual()["classes"]
    ]
    assert [c["layers/swiglu/gate_up"] for c in counts] == [4, 2]


def test_the_table_says_where_the_largest_buffers_come_from() -> None:
    ran = stagec("memory", *SMALL, "--fit", "caching")
    assert ran.code == 0
    assert re.search(r"%layers/swiglu/gate_up +stash +blocks/swiglu", ran.out)
    assert "caching: reserved" in ran.out


def test_a_limit_that_holds() -> None:
    assert stagec("memory", *SMALL, "--limit", "1TiB").code == 0


@LONG
def test_a_limit_that_does_not_hold_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that it prints works when pasted, and shows what was said of it."""
    monkeypatch.setattr(suggestions, "BUDGET", 8)
    job = *SMALL[:3], "--dp", "2", "--tp", "2"
    ran = stagec("memory", *job, "--limit", "12GB", "--advise")
    assert ran.code == 1
    assert re.search(r"stage0: peak \S+ GiB of 12.00 GiB: does not fit, by ", ran.out)
    assert "most of it is " in ran.err
    expected = re.findall(r"^  \[\d\]   (.*?)  +([0-9.]+ [MG]iB)  ", ran.err, re.M)
    commands = re.findall(r"^\[\d\] stagec (.*)$", ran.err, re.M)
    assert len(expected) == len(commands) > 1
    for (changes, peak), command in zip(expected, commands, strict=True):
        again = stagec(*shlex.split(command), "--json")
        assert again.code == 0, again.err
        assert set(changes.split()) <= set(command.split())
        assert "'12GB' is taken as 12GiB" in again.err
        classes = json.loads(again.out)["classes"]
        assert bytes_text(max(c["peak"] for c in classes)) == peak
        assert sum(c["ranks"] for c in classes) == 4
    assert re.search(r"^\d+ of [\d,]+ combinations of up to 3 changes were compiled", ran.err, re.M)


@LONG
def test_advice_is_data_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has the commands and the peaks that a terminal shows, and Python the same; the job that
    a suggestion describes has the figures that it states."""
    monkeypatch.setattr(suggestions, "BUDGET", 8)
    job = *SMALL[:3], "--dp", "2", "--tp", "2", "--limit", "12GB"
    ran = stagec("memory", *job, "--advise", "--json")
    advice = json.loads(ran.out)["advice"]
    shown = re.findall(r"^\[\d\] (.*)$", ran.err, re.M)
    assert [each["command"] for each in advice["suggestions"]] == shown
    assert (ran.code, advice["tried"]) == (1, 8)
    assert advice["smallest"]["peak"] <= min(each["peak"] for each in advice["suggestions"])
    assert "advice" not in json.loads(stagec("memory", *job, "--json").out)
    of = job_of("llama3-8b", sizes={"L": 4}, dp=2, tp=2)
    assert of.memory(limit="12GB", advise=True).advice == advice
    before, best = (
        sum(json.loads(stagec("analyze", *words, "--json").out)["classes"][0]["flops"].values())
        for words in (job[:-2], shlex.split(shown[0])[2:-2])
    )
    assert best - before == advice["suggestions"][0]["more_flops"]


@LONG
@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("--serve decode --batch 64 --context 8000 --tp 4 --dp 2", "0.9GB"),
        ("--serve prefill --prompt 300000 --tp 8", "6GB"),
        ("--serve mixed --step decode=16x4000,prefill=1x512+0 --tp 2 --dp 2", "1GB"),
    ],
)
def test_what_would_make_a_step_of_serving_fit(words: str, limit: str) -> None:
    """Steps keep their sequences: what is reported works when pasted, and holds no more."""
    ran = stagec(
        "memory", "llama3-8b", "--set", "L=2", *words.split(), "--limit", limit, "--advise"
    )
    assert ran.code == 1
    assert "bug" not in ran.err
    assert "combinations of up to 3 changes were compiled" in ran.err
    expected = re.findall(r"^\[\d\] stagec (.*)$", ran.err, re.M)
    assert expected
    for command in expected:
        assert words.partition(" --tp")[0] in command.replace(" --batch 1", "")
        assert stagec(*shlex.split(command)).code == 0


@LONG
def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "BUDGET", 4)
    ran = stagec("memory", *SMALL, "--limit", "1MB", "--advise")
    assert ran.code == 1
    said = r"nothing fits; the lowest peak is [\d.]+ [KMG]iB, with --offload"
    assert re.search(said, ran.err)


@LONG
def test_jobs_of_the_search_are_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What looks inside the job that was asked for looks at no other one."""
    monkeypatch.setattr(suggestions, "BUDGET", 1)
    ran = stagec(
        "memory", *SMALL, "--time-passes", "--dump-dir", tmp_path, "--limit", "1MB", "--advise"
    )
    assert ran.err.count("time per pass") == 1
    assert "nothing fits; the lowest peak is" in ran.err


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (("llama3-8b",), 32 * 4096 * 32 * 128),
        (("llama3-8b", "--tp", "4", "--sp"), 32 * 4096 * 8 * 128),
        (("llama3-8b", "--cp", "2"), 32 * 2048 * 32 * 128),
        (("llama3-8b", "--cp", "2", "--cp-mode", "ulysses"), 32 * 4096 * 16 * 128),
        (("deepseek-v3", "--tp", "2"), 61 * 4096 * 64 * 128),
    ],
)
def test_the_result_of_attention_is_offloaded_by_name(model: Sequence[str], size: int) -> None:
    """Half of the result of each layer in bf16, for two sequences: L*S*H*V elements."""
    ran = stagec("memory", *model, "--set", "B=2,S=4096", "--offload", "attn_out:0.5", "--json")
    (stage,) = json.loads(ran.out)["classes"]
    assert stage["host"] == 2 * size


def test_flags_do_not_change_a_text(tmp_path: Path) -> None:
    text = tmp_path / "s.stg"
    text.write_text(stagec("memory", *SMALL, "--print-strategy").out)
    ran = stagec("memory", *SMALL[:3], text, "--limit", "1GB", "--advise")
    assert (ran.code, "the strategy is a text, which flags do not change" in ran.err) == (1, True)


@pytest.mark.parametrize("limit", ["", "0", "80Gi", "-1", "1e9", "x" * 99, "80 GiBs", "h"])
def test_what_is_no_size(limit: str) -> None:
    ran = stagec("memory", *SMALL, "--limit", limit)
    assert ran.code == 2
    assert "expects a size such as 80GiB, or a device" in ran.err


def test_a_device_is_a_limit() -> None:
    ran = stagec("memory", *SMALL, "--limit", "h100")
    assert ran.code == 0
    assert "77.80 GiB are left" in ran.err
    ran = stagec("memory", *SMALL, "--limit", "h1000")
    assert (ran.code, "did you mean 'h100'? the devices are: a100-40g, " in ran.err) == (2, True)


def test_an_open_size_is_reported(tmp_path: Path) -> None:
    text = tmp_path / "open.stg"
    text.write_text(
        "stg.module @m {\n  stg.symbols[B, D]\n  stg.func @f(%x: f32[B, D], %w: f32[D, D | param]) "
        '{\n    %y = stg.einsum["bd,de->be"](%x, %w)\n    stg.return(%y)\n  }\n}\n'
    )
    ran = stagec("memory", text, "--pipeline", "place,plan")
    assert ran.code == 1
    assert "no value for D" in ran.err


def test_the_snapshot_replays_to_the_peak(tmp_path: Path) -> None:
    """Every free is of what lives at that address; the most bytes are the peak."""
    file = tmp_path / "snapshot.pickle"
    result = actual("--snapshot", file, "--stage", "1")
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


@crossed(microbatches=[8, 16], name=SCHEDULES)
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
        planner = MemoryTimeline.planner(module, func)
        most = max(
            sum(n * copies(planner.kept(s), module) for s, n in after.items())
            for turn in turns(timeline.order, planner.regions)
            for after in turn.after()
        )
        assert form.in_flight is not None
        assert most == form.in_flight[stage] * mine, stage


def copies(kept: frozenset[Buffer], module: Module) -> int:
    """How many outputs of a layer's activation function are among these buffers."""
    return sum(evaluate(b.copies, module.env) for b in kept if b.value.is_called("m"))
