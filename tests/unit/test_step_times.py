"""How long steps of requests take, and what users meet: sums of single steps, and definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.analysis.family import Compiled
from stagec.jobs import figures
from stagec.jobs.builder import JobBuilder
from stagec.jobs.figures import CompiledJob, compiled_of
from stagec.jobs.request.machine import machine_of
from stagec.jobs.session import Session
from stagec.jobs.step_modules import StepModules, step_times
from stagec.serving.latency import SecondsSpread, latencies
from stagec.serving.requests import Request
from stagec.serving.served import ServedRequest
from stagec.serving.step import SequenceClass, Step, parse_step, step_of
from stagec.serving.step_times import SECOND
from stagec.time.costs.replay_options import ReplayOptions
from tests.support import LLAMA, examples, stagec, tiny_options

H100 = "h100-sxm"
SMALL = ("llama3-8b", "--set", "L=2,D=256,F=512,V=512")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 100))
@examples(60)
def test_a_percentile_is_the_least_that_so_many_do_not_exceed(values: list[int], at: int) -> None:
    spread = SecondsSpread(sorted(values))
    enough = [v for v in values if 100 * sum(w <= v for w in values) >= at * len(values)]
    assert spread.percentile(at) == min(enough)
    assert spread.as_json()["mean"] == sum(values) / len(values)


def test_times_of_requests_by_definition() -> None:
    """From arrival to the first token; between tokens; a request of one token has none between."""
    rows = ((1, 5, 105, 105), (5, 0, 50, 90), (4, 7, 47, 107))
    done = [
        ServedRequest(
            Request(0, 10, output), 1, arrival=a * SECOND, first=b * SECOND, last=c * SECOND
        )
        for output, a, b, c in rows
    ]
    values = {name: [*map(int, spread.values)] for name, spread in latencies(done).items()}
    assert values == {"ttft": [40, 50, 100], "tpot": [10, 20], "latency": [90, 100, 100]}
    assert latencies(done, 1.0)["ttft"].values == [41, 51, 101]
    assert latencies([]) == {}


@st.composite
def classes_of_steps(draw: st.DrawFn) -> SequenceClass:
    new = draw(st.integers(1, 4))
    sampled = draw(st.integers(0, new))
    return SequenceClass(new, draw(st.integers(0, 99)), sampled, draw(st.integers(1, 5)))


@given(st.lists(classes_of_steps(), min_size=1, max_size=8))
@examples(60)
def test_sequences_taken_together_read_as_many_rows(classes: list[SequenceClass]) -> None:
    """As many sequences. Of those that decode as many tokens, and cached rows are rounded up by
    less than one each; prompts are one class, whose size is that of the mean."""
    step = step_of(classes)
    actual = step.together()
    assert actual.sequences == step.sequences
    decodes = {c.new for c in step.classes if c.new == c.sampled}
    prompts = [c for c in step.classes if c.new != c.sampled]
    assert len(actual.classes) <= len(decodes) + bool(prompts)
    for each in actual.classes:
        if each.new == each.sampled and each.new in decodes and not prompts:
            mine = [c for c in step.classes if (c.new, c.sampled) == (each.new, each.sampled)]
            rows = sum(c.count * c.cached for c in mine)
            assert each.tokens == sum(c.tokens for c in mine)
            assert rows <= each.count * each.cached < rows + each.count
    assert 2 * abs(actual.tokens - step.tokens) <= sum(c.count for c in prompts)


@given(st.lists(classes_of_steps(), min_size=1, max_size=8))
@examples(60)
def test_prompts_may_stay_as_they_are(classes: list[SequenceClass]) -> None:
    """All new tokens, all that are sampled and all prompts do, and one class decodes."""
    step = step_of(classes)
    actual = step.together(prompts=False)
    assert (actual.tokens, actual.sampled) == (step.tokens, step.sampled)
    prompts = [[c for c in s.classes if c.new != c.sampled] for s in (step, actual)]
    assert prompts[0] == prompts[1]
    new = [c.new for c in actual.classes if c.new == c.sampled]
    assert len(new) == len(set(new))


def test_traces_of_requests_have_one_kernel_over_all_that_decode(tmp_path: Path) -> None:
    """Three sequences of different contexts, as engines launch their attention; those that
    `--step` states have a kernel each."""
    path = tmp_path / "requests.csv"
    path.write_text("arrival,prompt,output\n0,8,9\n0,16,9\n0,24,9\n")
    words = ("--serve", "mixed", "--dry-run", "--quiet", "--print-after", "lower-to-trace")
    for step, kernels in (
        (("--requests", str(path)), {1, 3}),
        (("--step", "decode=1x8,decode=1x16,decode=1x24"), {3}),
    ):
        text = stagec("compile", *SMALL, *words, *step).err
        graphs = [graph.count("et.comp[attention") for graph in text.split("et.graph")[1:]]
        assert set(graphs) == kernels, step


def step_seconds(step: str) -> float:
    words = ("--serve", "mixed", "--step", step, "--machine", H100, "--json")
    ran = stagec("time", *SMALL, *words)
    assert ran.code == 0, ran.err
    return float(json.loads(ran.out)["step_seconds"])


def served(tmp_path: Path, requests: str, *words: str) -> dict[str, Any]:
    """What the manifest says of requests, given as lines of arrival, prompt and output."""
    file = tmp_path / "requests.csv"
    file.write_text(f"arrival,prompt,output\n{requests}\n")
    out = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
    line = ("--serve", "mixed", "--requests", str(file), *words, "-o", str(out), "--quiet")
    ran = stagec("compile", *SMALL, *line)
    assert ran.code == 0, ran.err
    return dict(json.loads((out / "manifest.json").read_text())["serving"])


def test_a_request_alone_takes_its_steps(tmp_path: Path) -> None:
    """Two chunks of a prompt, then three steps of decode: their seconds, one by one."""
    actual = served(tmp_path, "0,96,4", "--chunk", "64", "--machine", H100)
    first = step_seconds("chunk=1x64+0") + step_seconds("prefill=1x32+64")
    more = [step_seconds(f"decode=1x{c}") for c in (96, 97, 98)]
    assert actual["times"]["ttft"]["p50"] == pytest.approx(first, abs=5e-9)
    assert actual["times"]["tpot"]["mean"] == pytest.approx(sum(more) / 3, abs=5e-9)
    assert actual["times"]["latency"]["p99"] == pytest.approx(first + sum(more), abs=9e-9)
    assert actual["machine"] == H100
    assert "tick_seconds" not in actual


def test_a_tick_is_what_it_says(tmp_path: Path) -> None:
    """Also with a machine, of which traces have durations; without either it is 10 ms."""
    for words, tick in (
        (("--tick", "3", "--machine", H100), 0.003),
        (("--tick", "3"), 0.003),
        ((), 0.01),
    ):
        actual = served(tmp_path, "0,8,5", *words)
        assert actual["times"]["tpot"]["p90"] == pytest.approx(tick)
        assert actual["times"]["ttft"]["mean"] == pytest.approx(tick)
        assert "machine" not in actual


def test_a_busy_server_lets_requests_wait(tmp_path: Path) -> None:
    """Requests that come together: the last first token is later than that of one alone."""
    alone = served(tmp_path, "0,64,3", "--machine", H100)["times"]
    lines = "\n".join("0,64,3" for _ in range(8))
    actual = served(tmp_path, lines, "--machine", H100, "--batch", "2")["times"]
    assert actual["ttft"]["p99"] > 3 * alone["ttft"]["p99"]
    assert actual["ttft"]["p50"] < actual["ttft"]["p90"] <= actual["ttft"]["p99"]


def test_each_distinct_step_is_evaluated_once() -> None:
    """Steps of one structure share a compile; classes that are taken together are one step."""
    job = tiny_options(LLAMA).changed(serve="mixed", sizes={"L": 2, "D": 8, "H": 4, "G": 2, "K": 2})
    modules = StepModules(job, Session())
    times = step_times(modules, machine_of(H100, Session()), ReplayOptions(graphs=True), 1)
    texts = ["decode=2x8", "decode=1x7,decode=1x9", "decode=2x8", "decode=3x8", "decode=2x9"]
    steps: list[Step] = [parse_step(t) for t in texts]
    actual = [times(step) for step in steps]
    assert actual[0] == actual[1] == actual[2]
    assert len(set(actual)) == 3
    compiles = modules.compiles
    for step in (steps[0], *steps[2:]):  # those without classes that are taken together
        modules.classes(step)
    assert modules.compiles == compiles == 1
    assert actual[0][0] == actual[0][1], "one stage"


@pytest.mark.parametrize("words", [(), ("--pp", "2"), ("--prompt-steps", "alone")])
def test_recorded_steps_are_those_of_a_server_over_time(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Both commands let the same requests into the same steps, which take as long."""
    lines = "\n".join(f"{i / 1e4},{64 + 7 * i},{5 + i % 4}" for i in range(20))
    how = (*words, "--machine", H100)
    recorded = served(tmp_path, lines, *how)
    asked = ("--requests", str(tmp_path / "requests.csv"), "--step-grid", "exact", "--json")
    ran = stagec("serve", *SMALL, *how, *asked)
    assert ran.code == 0, ran.err
    simulated = json.loads(ran.out)
    assert recorded["times"] == simulated["times"]
    (steps,) = recorded["steps"]
    assert sum(count for _, count in steps) == simulated["pools"]["server"]["steps"]


def test_steps_of_one_structure_share_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 mixed steps, asked for twice, those that are decided alike are compiled once, and give
    what a compile of their own gives."""
    made: list[str | None] = []

    def counted(builder: JobBuilder) -> Compiled:
        made.append(builder.options.step)
        return compiled_of(builder)

    monkeypatch.setattr(figures, "compiled_of", counted)
    monkeypatch.setattr(figures, "_structures", {})  # other tests have compiled some
    job = tiny_options(LLAMA).changed(serve="mixed", sizes={"L": 2, "D": 8, "H": 4, "G": 2, "K": 2})
    texts = [f"decode={n}x{c},prefill=1x{k}+0" for n in (2, 3) for c in (5, 8) for k in (1, 4, 6)]
    jobs = (CompiledJob.of(job.changed(step=text)) for text in (*texts, *texts))
    costs = [(each.values, each.figures()) for each in jobs]
    modules = StepModules(job, Session())
    for (values, cost), text in zip(costs, texts, strict=False):
        modules.compiled(parse_step(text))
        own = compiled_of(modules.builder_of(parse_step(text), Session()))
        assert cost == own.at(values)
    assert len(made) == modules.compiles < len(texts)


def test_the_strategy_of_a_server_is_printed() -> None:
    """It has requests and no step of its own."""
    words = ("llama3-8b", "--set", "L=2", "--serve", "mixed", "--tp", "2")
    ran = stagec("compile", *words, "--requests", "poisson:rate=9,count=2", "--print-strategy")
    assert ran.code == 0, ran.err
    assert "stg.mesh @pod[tp = 2]" in ran.out
