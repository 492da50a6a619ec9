"""`stagec search` for jobs of several pods: the answer is that of every point, asked by itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.request.flags import PartText
from stagec.jobs.request.options import JobOptions
from stagec.machines import machines
from stagec.searches.cache import cached
from stagec.searches.explore.layout import Layers
from stagec.searches.explore.space import Space
from stagec.searches.run import Question
from tests.support import LONG, stagec

MACHINE = ("--machine", "h100-sxm")
WHISPER = ("whisper-large-v3", "--set", "B=16,L=2,L_dec=2")
PART = ("--part", "encoder=e: dp=2")
TRAINED = (
    *("--ranks", "4", "--tp", "1,2", "--pp", "1", "--cp", "1", "--zero", "0,1"),
    *("--recompute", "none", "--microbatch-size", "2,4"),
)
ONE_POINT = ("--pp", "1", "--cp", "1", "--recompute", "none")
LLAMA = (
    *("llama3-70b", "--set", "L=2", "--serve", "decode", "--context", "512", "--batch", "8"),
    *("--speculative", "3"),
)
DRAFT = ("--draft", "llama3-8b[L=2]: tp=2")
SHARED = ("--draft", "llama3-8b[L=2]: on=model")
SERVED = ("--ranks", "4", "--tp", "1..4", "--pp", "1")
HOW = (*MACHINE, "--jobs", "1", "--no-cache", "--no-levers")


def reported(*words: str) -> Any:
    ran = stagec(*words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def points_of_parts() -> Iterator[tuple[str, ...]]:
    """The flags of the points of `TRAINED`."""
    for tp in (1, 2):
        for zero in (0, 1):
            for size in (2, 4):
                dp = 4 // tp
                sp = ("--sp",) if tp > 1 else ()
                mesh = ("--tp", f"{tp}", "--dp", f"{dp}", *sp, "--zero", f"{zero}")
                yield *mesh, "--microbatches", f"{16 // (dp * size)}"


def points_of_drafts() -> Iterator[tuple[str, ...]]:
    """The flags of the points of `SERVED`."""
    for tp in (1, 2, 4):
        mesh = ("--tp", f"{tp}", "--dp", f"{4 // tp}")
        yield mesh
        if tp > 1:
            yield *mesh, "--dp-attention"


@LONG
@pytest.mark.parametrize(
    ("model", "pod", "space", "points", "ranks"),
    [
        (WHISPER, PART, TRAINED, [*points_of_parts()], 6),
        (LLAMA, DRAFT, SERVED, [*points_of_drafts()], 6),
        (LLAMA, SHARED, SERVED, [*points_of_drafts()], 4),
    ],
    ids=["part", "draft", "shared"],
)
def test_the_best_are_those_of_every_point(
    model: tuple[str, ...],
    pod: tuple[str, ...],
    space: tuple[str, ...],
    points: list[tuple[str, ...]],
    ranks: int,
) -> None:
    """By the step of all pods, each asked of `stagec time`; tokens are shared by all ranks, and the
    commands give the same again."""
    actual = reported("search", *model, *pod, *space, *HOW, "--top", "20")
    assert actual["proven"]
    assert actual["legal"] == actual["evaluated"] == len(points)
    steps = [reported("time", *model, *pod, *p, *MACHINE, "--no-levers") for p in points]
    seconds = sorted(step["step_seconds"] for step in steps)
    assert [row["step_seconds"] for row in actual["best"]] == pytest.approx(seconds, rel=1e-12)
    for row in (actual["best"][0], actual["best"][-1]):
        tool, verb, *words = shlex.split(row["command"])
        assert (tool, verb, words[-2]) == ("stagec", "compile", "-o")
        step = reported("time", *words[:-2], *MACHINE, "--no-levers")
        assert row["step_seconds"] == step["step_seconds"]
        assert row["ranks"] == step["ranks"] == ranks
        assert row["mesh"] == step["mesh"]
        assert row["breakdown"] == step["breakdown"]
        assert row["tokens_per_second_per_rank"] == step["tokens_per_second_per_rank"]
        plan = reported("memory", *words[:-2])
        pods = plan.get("pods", {"main": plan}).values()
        fullest = max((c for p in pods for c in p["classes"]), key=lambda each: each["peak"])
        assert row["memory_peak"] == fullest["peak"]
        assert row["memory"] == fullest["categories"]
        assert pod[1] in shlex.split(row["strategy"])


@LONG
def test_every_pod_must_fit() -> None:
    """The encoder on one rank holds more than the rest of the model on four."""
    part = ("--part", "encoder=e: zero=0")
    space = (*ONE_POINT, "--ranks", "4", "--tp", "2", "--zero", "1", "--microbatch-size", "8")
    (row,) = reported("search", *WHISPER, *part, *space, *HOW)["best"]
    words = shlex.split(row["command"])[2:-2]
    kept = {p: d["classes"][0]["peak"] for p, d in reported("memory", *words)["pods"].items()}
    assert kept["main"] < kept["encoder"] == row["memory_peak"]
    limit = ("--limit", f"{kept['encoder'] - 1}")
    ran = stagec("search", *WHISPER, *part, *space, *HOW, *limit)
    assert ran.code == 1
    assert "no strategy of the space fits" in ran.err


@LONG
def test_objectives_count_the_ranks_of_all_pods() -> None:
    """A rank-hour of two ranks more costs what their rank-hours cost."""
    few = (*ONE_POINT, "--ranks", "2,4", "--tp", "2", "--zero", "0", "--microbatch-size", "4")
    by_cost = ("--price", "2", "--objective", "cost")
    actual = reported("search", *WHISPER, *PART, *few, *HOW, *by_cost)
    assert [each["ranks"] for each in actual["searches"]] == [4, 6]
    for row in actual["best"]:
        assert row["cost"] == pytest.approx(row["step_seconds"] * row["ranks"] / 3600 * 2)


@LONG
def test_answers_are_kept_by_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other flags of a part, or another text of a draft model, are another question."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few: tuple[str, ...] = (
        *ONE_POINT,
        "--ranks",
        "2",
        "--tp",
        "2",
        "--zero",
        "0",
        "--microbatch-size",
        "8",
    )
    few = (*few, *MACHINE, "--jobs", "1")
    first = reported("search", *WHISPER, *PART, *few)
    assert reported("search", *WHISPER, *PART, *few) == {**first, "cached": True}
    assert "cached" not in reported("search", *WHISPER, "--part", "encoder=e: dp=4", *few)
    assert "cached" not in reported("search", *WHISPER, *few)
    text, file = stagec("models", "llama3-8b").out, tmp_path / "drafts.stg"
    drafted = (*LLAMA, "--draft", f"{file}: tp=2", "--ranks", "2", "--tp", "2", "--pp", "1")
    for layers in (2, 3):
        file.write_text(text.replace("L = 32", f"L = {layers}"))
        assert "cached" not in reported("search", *drafted, *MACHINE, "--jobs", "1")


def test_answers_are_kept_by_the_texts_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed machine of a part, or a changed stack, also one that it extends, is another
    question."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine, stack = tmp_path / "mine.toml", tmp_path / "mine.stg"
    part = PartText("e", "encoder", f"dp=4,on-machine={machine}")
    base = JobOptions("whisper-large-v3", part=(part,), stack=str(stack))
    question = Question(base, {}, Layers(0, 0, 0), Space({}), machines()["h100-sxm"], 1, None)
    given = {"cache": True, "neighbours": False, "levers": False, "sensitivity": False}

    def is_kept() -> bool:
        return "cached" in cached(given, [question], lambda: {"proven": True})

    machine.write_text('base = "h100-sxm"')
    stack.write_text("stg.stack @mine {}")
    assert [is_kept(), is_kept()] == [False, True]
    machine.write_text('base = "b200"')
    assert [is_kept(), is_kept()] == [False, True]
    stack.write_text("stg.stack @mine { stg.fusion[none] }")
    assert [is_kept(), is_kept()] == [False, True]
    stack.write_text('stg.stack @mine[extends = "under.stg"] {}')
    for shared in ("stg.fusion[none]", "stg.fusion[products]"):
        (tmp_path / "under.stg").write_text(f"stg.stack @under {{ {shared} }}")
        assert [is_kept(), is_kept()] == [False, True]


def test_a_stack_of_the_library_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it the folder of that name, such as a checkout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm").mkdir()
    base = JobOptions("llama3-8b", stack="vllm")
    question = Question(base, {}, Layers(0, 0, 0), Space({}), machines()["h100-sxm"], 1, None)
    given = {"cache": True, "neighbours": False, "levers": False, "sensitivity": False}
    assert cached(given, [question], lambda: {"proven": True}) == {"proven": True}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*WHISPER, "--part", "encoder=ex: dp=2"), "the model has no value '%ex'"),
        ((*WHISPER, "--part", "encoder=e: dpp=2"), "'dpp' is not a flag of a strategy"),
        ((*WHISPER, "--part", "encoder"), "expects NAME=VALUE: FLAGS"),
        (
            (
                *("whisper-large-v3", "--set", "L=2,L_dec=2", "--serve", "decode"),
                *("--context", "64", "--batch", "4", *PART),
            ),
            "the step of serving does not compute a value '%e'",
        ),
        ((*LLAMA[:-2], *DRAFT), "--draft needs --speculative"),
        (("llama3-8b", "--set", "B=8,L=2", *DRAFT), "--draft needs a step of serving"),
        (
            ("llama3-8b", "--serve", "prefill", "--prompt", "64", "--batch", "8", *DRAFT),
            "--draft needs --serve decode",
        ),
        ((*LLAMA, "--draft", "llama3-8x: tp=2"), "did you mean 'llama3-8b'?"),
        ((*LLAMA, "--draft", "llama3-8b: tpp=2"), "'tpp' is not a flag of a strategy"),
        ((*LLAMA, *DRAFT, *PART), "--draft and --part cannot be used together"),
    ],
)
def test_what_makes_no_pods_is_refused_once(words: tuple[str, ...], error: str) -> None:
    """Before any point is evaluated."""
    ran = stagec("search", *words, *SERVED, *HOW)
    assert ran.code in (1, 2)
    assert error in ran.err
    assert ran.err.lower().count("error:") == 1
    assert "points" not in ran.out
    assert "Traceback" not in ran.err


def test_a_refusal_of_a_point_says_which_pod_it_is_about() -> None:
    ran = stagec("search", *LLAMA, "--draft", "llama3-8b[L=2]: tp=3", *SERVED, *HOW)
    assert ran.code == 1
    assert "refused by the compiler: draft: H = 32, G = 8" in ran.out
