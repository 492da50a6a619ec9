"""`stagec search --serve`: the answer is that of all points, within the limits, and it compiles."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.request.machine import machine_of
from stagec.jobs.session import Session
from stagec.searches.jobs import Evaluated
from stagec.searches.question import questions
from stagec.searches.run import Answer, Question
from stagec.searches.space import KNOBS
from tests.support import EXHAUSTIVE, LONG, stagec
from tests.unit.test_search import NOT_GIVEN, answer_of

Given = Mapping[str, Any]
DECODE: Given = {"serve": "decode", "context": 1024}
PREFILL: Given = {"serve": "prefill", "prompt": 512}
MIXED: Given = {"serve": "mixed", "step": "decode=16x1024,prefill=1x128+384"}
#: Small spaces: model, sizes, ranks, and what is asked.
SPACES: tuple[tuple[str, dict[str, int], int, Given], ...] = (
    ("llama3-70b", {"L": 4}, 8, {**DECODE, "batch": (16, 64)}),
    ("llama3-8b", {"L": 8}, 8, {**PREFILL, "batch": (8,)}),
    ("llama3-8b", {"L": 4}, 8, MIXED),
    ("qwen3-30b-a3b", {"L": 4}, 8, {**DECODE, "batch": (64,), "ep": (1, 4, 8)}),
    ("deepseek-v3", {"L": 4}, 8, {**DECODE, "batch": (128,), "ep": (8,), "tp": (1, 2)}),
    ("llama3-8b", {"L": 8}, 8, {**DECODE, "batch": (32,), "tpot": 2e-3}),
    ("llama3-8b", {"L": 4}, 8, {**DECODE, "batch": (32,), "cp": (1, 2), "objective": "memory"}),
    ("mamba2-2.7b", {"L": 4}, 4, {**DECODE, "batch": (16,)}),
    ("qwen3-30b-a3b", {"L": 2}, 4, {**MIXED, "step": "decode=15x64,prefill=1x49+79"}),
    # fewer tokens than it takes to reach all experts
    ("qwen3-30b-a3b", {"L": 4}, 8, {**DECODE, "batch": (8,), "ep": (1, 4, 8)}),
)
CASES = [
    pytest.param(i, id=f"{s[0]}-{s[3]['serve']}-{i}", marks=EXHAUSTIVE if i > 2 else ())
    for i, s in enumerate(SPACES)
]


def asked(model: str, sizes: dict[str, int], ranks: int, given: Given) -> list[Question]:
    about: dict[str, Any] = {"model": model, "sizes": sizes, "ranks": (ranks,)}
    about |= {"machine": (machine_of("h100-sxm", Session()),), "top": 3, "overlap": True}
    about |= {"used_ranks": None, "stack": "ideal"}
    return questions({**dict.fromkeys((*KNOBS, *NOT_GIVEN)), **about, **given}, Session())


def value(answer: Answer, actual: Evaluated) -> float | None:
    """The objective, by its definition; None beyond a limit."""
    question = answer.question
    if actual.seconds is None or actual.seconds > (question.most_seconds or 1e9):
        return None
    if question.objective == "memory":
        return actual.peak
    assert actual.tokens is not None
    groups = actual.tokens / question.group.tokens if question.group is not None else 1
    return actual.seconds / groups


@LONG
@pytest.mark.parametrize("number", CASES)
def test_the_best_are_those_of_all_points(number: int) -> None:
    """And no bound is above its value."""
    for question in asked(*SPACES[number]):
        actual, every = answer_of(question), answer_of(replace(question, exhaustive=True))
        known = {n: v for n, v in every.known.items() if isinstance(v, Evaluated)}
        values = {v for e in known.values() if (v := value(every, e)) is not None}
        best = list(dict.fromkeys(f.value for f in actual.best))
        assert best == pytest.approx(sorted(values)[: len(best)])
        assert len(actual.best) == question.wanted or len(best) == len(values)
        assert actual.evaluated <= every.evaluated == len(every.job_list.jobs) > 1
        if actual.bounds is not None:
            seconds, kept = actual.bounds
            assert any(seconds)
            assert all(kept[n] <= e.peak for n, e in known.items())
            timed = {n: e.seconds for n, e in known.items() if e.seconds is not None}
            assert all(seconds[n] <= s for n, s in timed.items())


WORDS = ("search", "llama3-8b", "--set", "L=4", "--ranks", "8", "--machine", "h100-sxm")
QUIET = ("--no-cache", "--jobs", "1")


def searched(*words: str) -> dict[str, Any]:
    ran = stagec(*WORDS, *words, *QUIET, "--json")
    assert ran.code == 0, ran.err + ran.out
    return dict(json.loads(ran.out))


@LONG
def test_throughput_within_a_limit(tmp_path: Path) -> None:
    """The largest batch whose step is fast enough wins; its command compiles to traces that hold,
    and takes and holds what was predicted."""
    words = ("--serve", "decode", "--context", "1024", "--batch", "8..128", "--dp", "8")
    every = searched(*words)["searches"]
    rates = [s["best"]["tokens_per_second_per_rank"] for s in every]
    assert rates == sorted(rates)
    assert len(rates) == 5
    limit = every[3]["best"]["step_seconds"] * 1.0001
    first = searched(*words, "--tpot", f"{limit * 1e3:.9f}ms")["best"][0]
    assert first["batch"] == 64
    assert "--serve" not in first["strategy"]
    argv = shlex.split(first["command"])
    assert ("--batch", "64") in pairwise(argv)
    job = argv[2 : argv.index("-o")]
    timed = json.loads(stagec("time", *job, "--machine", "h100-sxm", "--json").out)
    assert timed["step_seconds"] == first["step_seconds"]
    kept = json.loads(stagec("memory", *job, "--json").out)
    assert max(c["peak"] for c in kept["classes"]) == first["memory_peak"]
    folder = tmp_path / "traces"
    assert stagec("compile", *job, "-o", folder, "--quiet").code == 0
    assert stagec("check", folder).code == 0


@LONG
def test_mixed_steps_count_what_groups_sample() -> None:
    """Of one step a group: more groups are better than faster ones; rates are those of tokens that
    users get."""
    words = ("--serve", "mixed", "--step", MIXED["step"])
    best = searched(*words)["best"]
    for row in best:
        groups = row["mesh"].get("dp", 1) * (
            row["mesh"].get("tp", 1) if "--dp-attention" in row["strategy"] else 1
        )
        rate = 17 * groups / row["step_seconds"] / 8
        assert row["tokens_per_second_per_rank"] == pytest.approx(rate)
    rates = [row["tokens_per_second_per_rank"] for row in best]
    assert rates == sorted(rates, reverse=True)
    # a prompt of 512 in chunks of 128 takes four steps
    limit = 4 * max(row["step_seconds"] for row in best) / 1.0001
    fewer = searched(*words, "--ttft", f"{limit * 1e3:.9f}ms")["best"]
    slowest = max(best, key=lambda row: row["step_seconds"])
    assert slowest["strategy"] not in [row["strategy"] for row in fewer]
    assert {r["strategy"] for r in best} - {slowest["strategy"]} <= {r["strategy"] for r in fewer}


def test_a_preset_gives_its_step() -> None:
    ran = stagec(
        *("search", "--seed-from", "llama3-405b-decode", "--ranks", "8", "--machine", "h200"),
        *("--print-space",),
    )
    assert ran.code == 0, ran.err
    assert "stg.vary[dp_attention" in ran.out
    assert "stg.vary[zero" not in ran.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tpot", "30ms"), "--tpot needs --serve decode or mixed"),
        (("--serve", "prefill", "--prompt", "8", "--tpot", "30ms"), "needs --serve decode"),
        (("--serve", "decode", "--context", "8", "--ttft", "1s"), "needs --serve prefill"),
        (("--serve", "decode"), "needs --context"),
        (("--context", "8"), "--context needs a step of serving"),
        (("--serve", "mixed"), "needs --batch and --context"),
        (("--serve", "decode", "--context", "8", "--batch", "1", "--set", "B=2"), "give one"),
    ],
)
def test_what_is_wrong_is_reported(words: tuple[str, ...], says: str) -> None:
    ran = stagec(*WORDS, *words, *QUIET)
    assert ran.code == 1
    assert says in ran.err
    assert "Traceback" not in ran.err


@LONG
def test_positions_are_warned_of_once() -> None:
    words = ("--serve", "decode", "--context", "9000", "--batch", "8,16", "--tp", "8", "--pp", "1")
    ran = stagec(*WORDS, *words, *QUIET)
    assert ran.err.count("reaches position 9,001") == 1
