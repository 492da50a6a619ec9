"""A draft model in a pod of its own, or on the ranks of its model: its traces and counts, what is
refused, and the time that a token takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import EXHAUSTIVE, LONG, stagec

BATCH, CONTEXT = 8, 31
SMALL = "L=4,D=64,F=64,V=64,H=8,G=4,K=8,theta=100"
TINY = "L=2,D=32,F=32,V=64,H=4,G=2,K=8,theta=100"
TARGET = ("llama3-8b", "--set", SMALL, "--serve", "decode", "--batch", f"{BATCH}")
STEP = (*TARGET, "--context", f"{CONTEXT}")


def draft(flags: str = "", sizes: str = TINY) -> tuple[str, str]:
    return "--draft", f"llama3-8b[{sizes}]: {flags}"


def expected(command: str, *words: str) -> dict[str, Any]:
    ran = stagec(command, *words, "--json")
    assert ran.code == 0, ran.err
    actual: dict[str, Any] = json.loads(ran.out)
    return actual


@pytest.mark.parametrize(
    ("main", "flags", "copies"),
    [
        pytest.param("--tp 4", "tp=2", (4, 2)),
        pytest.param("--dp 2 --tp 2", "dp=4", (2, 1), marks=EXHAUSTIVE),
        pytest.param("--dp 2 --microbatches 2", "tp=2,microbatches=2", (1, 2), marks=EXHAUSTIVE),
        pytest.param("--pp 2 --microbatches 1 --tp 2", "tp=2", (2, 2), marks=EXHAUSTIVE),
        pytest.param("--cp 2", "dp=2,tp=2", (2, 2), marks=EXHAUSTIVE),
    ],
)
def test_pods_are_one_job(main: str, flags: str, copies: tuple[int, int], tmp_path: Path) -> None:
    """The checker proves it. Each rank that holds words gets each of them once, as four bytes."""
    drafts = 3
    words = (*STEP, "--speculative", f"{drafts}", *main.split(), *draft(flags))
    ran = stagec("compile", *words, "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path / "job", "--json")
    assert checked.code == 0, checked.out
    assert json.loads(checked.out)["rendezvous"]
    manifest = json.loads((tmp_path / "job" / "manifest.json").read_text())
    assert set(manifest["pods"]) == {"main", "draft"}
    assert f"--draft '{draft(flags)[1]}'" in manifest["command"]
    crossings = expected("analyze", *words)["crossings"]
    sent = {(each["source"], each["to"]): each["bytes"] for each in crossings}
    in_main, in_draft = copies
    assert sent == {
        ("draft", "main"): in_main * BATCH * drafts * 4,
        ("main", "draft"): in_draft * BATCH * (drafts + 1) * 4,
    }


@pytest.mark.parametrize("flags", ["tp=2", pytest.param("dp=2", marks=EXHAUSTIVE)])
def test_drafts_cost_steps_of_decode(flags: str) -> None:
    """Products, pairs of attention and collectives are those of steps of a word each, with a token
    more in each; weights are held once, and caches as of the last of them. The pod that verifies
    costs what it costs by itself."""
    drafts = 3
    words = (*STEP, "--tp", "2", "--speculative", f"{drafts}")
    pods = expected("analyze", *words, *draft(flags))["pods"]
    axis, degree = flags.split("=")
    alone = ("llama3-8b", "--set", TINY, *TARGET[3:], f"--{axis}", degree)
    steps = [expected("analyze", *alone, "--context", str(CONTEXT + n)) for n in range(drafts)]
    (mine,) = pods["draft"]["classes"]
    each = [step["classes"][0] for step in steps]
    assert mine["matmul_flops"]["forward"] == sum(s["matmul_flops"]["forward"] for s in each)
    assert _reduced(mine) == sum(map(_reduced, each))
    for category in ("parameters", "caches"):
        assert mine["memory"][category] == each[-1]["memory"][category]
    (judge,), (theirs,) = pods["main"]["classes"], expected("analyze", *words)["classes"]
    assert judge["matmul_flops"] == theirs["matmul_flops"]
    assert judge["memory"]["caches"] == theirs["memory"]["caches"]


def _reduced(each: dict[str, Any]) -> int:
    return sum(row["bytes"] for row in each["collectives"] if row["op"] == "all_reduce")


#: The flags of the model, those of a pod that drafts, and those of a draft on the model's ranks.
SHARED = [
    pytest.param("--tp 2", "tp=2", "on=model"),
    pytest.param("--tp 2", "", "tp=1,on=model"),
    pytest.param("--dp 2 --tp 2", "dp=2,tp=2", "tp=2,on=model,dp=2", marks=EXHAUSTIVE),
    pytest.param("--mesh dp=2,tp=2", "mesh=dp=2", "on=model,tp=1", marks=EXHAUSTIVE),
]


@pytest.mark.long
@pytest.mark.parametrize(("main", "own", "flags"), SHARED)
def test_a_draft_on_the_ranks_of_its_model(main: str, own: str, flags: str, tmp_path: Path) -> None:
    """The ranks are those of the model. They do what those of both pods do, without messages, and
    hold weights and caches of both; the checker proves the traces."""
    words = (*STEP, "--speculative", "3", *main.split())
    pods = expected("analyze", *words, *draft(own))["pods"].values()
    both = expected("analyze", *words, *draft(flags))
    assert both["ranks"] == next(iter(pods))["ranks"]
    assert both["parameters"] == sum(pod["parameters"] for pod in pods)
    (mine,), each = both["classes"], [pod["classes"][0] for pod in pods]
    assert mine["matmul_flops"]["forward"] == sum(c["matmul_flops"]["forward"] for c in each)
    assert _reduced(mine) == sum(map(_reduced, each))
    assert mine["p2p"] == []
    for category in ("parameters", "caches"):
        assert mine["memory"][category] == sum(c["memory"][category] for c in each)
    assert stagec("compile", *words, *draft(flags), "-o", tmp_path / "job").code == 0
    checked = json.loads(stagec("check", tmp_path / "job", "--json").out)
    assert checked["ok"]
    assert checked["ranks"] == both["ranks"]


@pytest.mark.long
@pytest.mark.parametrize(("main", "own", "flags"), SHARED)
def test_models_on_the_same_ranks_take_turns(main: str, own: str, flags: str) -> None:
    """A step is as long as the steps of both models by themselves, and does the model FLOPs of
    both."""
    words = (*STEP, "--speculative", "3", "--machine", "h100-sxm", *main.split())
    pods, both = expected("time", *words, *draft(own)), expected("time", *words, *draft(flags))
    assert both["step_seconds"] == pytest.approx(sum(pods["alone_seconds"].values()), rel=0.02)
    done = [each["mfu"] * each["step_seconds"] * each["ranks"] for each in (pods, both)]
    assert done[0] == pytest.approx(done[1], rel=1e-9)
    assert both["tokens"] == pods["tokens"]
    assert both["turn_seconds"] == pytest.approx(pods["alone_seconds"], rel=0.02)
    assert sum(both["turn_seconds"].values()) == pytest.approx(both["step_seconds"], rel=1e-12)
    assert "By turns: draft" in stagec("time", *words, *draft(flags)).out


@pytest.mark.parametrize(("main", "own", "flags"), SHARED)
def test_models_on_the_same_ranks_share_memory(main: str, own: str, flags: str) -> None:
    """What stays is that of both, what else they need is there by turns. Memory says which of them
    takes what."""
    words = (*STEP, "--speculative", "3", *main.split())
    pods = expected("memory", *words, *draft(own))["pods"].values()
    (both,) = expected("memory", *words, *draft(flags))["classes"]
    each = [pod["classes"][0] for pod in pods]
    assert max(c["peak"] for c in each) < both["peak"] < sum(c["peak"] for c in each)
    assert set(both["models"]) == {"main", "draft"}
    for category, size in both["categories"].items():
        assert sum(model.get(category, 0) for model in both["models"].values()) == size
    for actual, alone in zip(both["models"].values(), each, strict=True):
        for category in ("parameters", "caches"):
            assert actual[category] == alone["categories"][category]
    assert "main" in stagec("memory", *words, *draft(flags)).out


def test_the_rate_of_a_step_that_verifies_is_that_of_verified_tokens() -> None:
    words = ("time", *STEP, "--machine", "h100-sxm", "--no-levers")
    assert " verified tokens/s (" in stagec(*words, "--speculative", "3").out
    plain = stagec(*words).out
    assert " tokens/s (" in plain
    assert "verified" not in plain


def test_a_draft_without_experts_has_the_axes_of_a_model_with_experts() -> None:
    words = (
        "mixtral-8x7b",
        "--set",
        f"{SMALL},M=64".replace("F=64,", ""),
        *STEP[3:],
        "--speculative",
        "2",
    )
    actual = expected("analyze", *words, "--dp", "4", "--ep", "4", *draft("on=model"))
    assert actual["mesh"] == {"ep": 4}
    assert actual["classes"][0]["p2p"] == []


@LONG
def test_key_value_heads_are_replicated_in_both_models_alike() -> None:
    words = (*STEP, "--speculative", "2", "--tp", "8")
    actual = expected("analyze", *words, *draft("on=model", TINY.replace("H=4,G=2", "H=8,G=4")))
    assert actual["mesh"] == {"tp": 4, "tpr": 2}
    ran = stagec("analyze", *words, *draft("on=model", TINY.replace("H=4", "H=8")))
    assert "has tp = 2, tpr = 4, and these are tp 4 x tpr 2" in ran.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*STEP, *draft()), "--draft needs --speculative"),
        ((*STEP, "--speculative", "0", *draft()), "--draft needs --speculative"),
        ((*TARGET, "--context", "0", "--speculative", "2", *draft()), "--context 0 caches none"),
        (("llama3-8b", *draft()), "--draft needs a step of serving"),
        (("llama3-8b", "--serve", "prefill", "--prompt", "4", *draft()), "needs --serve decode"),
        ((*STEP, "--speculative", "2", *draft("tpp=2")), "'tpp' is not a flag of a strategy"),
        ((*STEP, "--speculative", "2", *draft("tp=3")), "in the pod 'draft'"),
        ((*STEP, "--speculative", "2", "--draft", "llama3-8x"), "did you mean 'llama3-8b'?"),
        ((*STEP, "--speculative", "2", *draft(sizes=f"{TINY},V=65")), "V is given twice"),
        (
            (*STEP, "--speculative", "2", *draft(sizes=TINY.replace("V=64", "V=65"))),
            "tokens of a vocabulary of 65 in 'draft', expected the 64 of 'main'",
        ),
        ((*STEP, "--speculative", "2", "--draft", "llama3-8b[L=2"), "expects MODEL: FLAGS"),
        ((*STEP, "--speculative", "2", "--draft", ": tp=2"), "expects MODEL: FLAGS"),
        (
            (*STEP, "--speculative", "2", "--microbatches", "2", *draft("microbatches=4")),
            "microbatches=4",
        ),
        ((*STEP, "--speculative", "2", "--pipeline", "serve", *draft()), "takes no strategy text"),
        (
            ("llama3-8b", "--serve", "disaggregated", "--prompt", "8", *draft()),
            "--draft and --serve disaggregated cannot be used together",
        ),
        ((*STEP, "--speculative", "2", *draft("on=rank0")), "expects on=model"),
        (
            (*STEP, "--speculative", "2", "--tp", "4", *draft("tp=2,on=model")),
            "ranks of the model, tp 4",
        ),
        ((*STEP, "--speculative", "2", *draft("dp=2,on=model")), "ranks of the model, one device"),
        (
            (*STEP, "--speculative", "2", "--tp", "2", *draft("ranks=4,on=model")),
            "ranks of the model, tp 2",
        ),
        (
            (*STEP, "--speculative", "2", "--pp", "2", *draft("on=model")),
            "does not support pipeline stages",
        ),
        (
            (*STEP, "--speculative", "2", "--microbatches", "2", *draft("on=model")),
            "waits for all sequences of a step",
        ),
        (
            (*STEP, "--speculative", "2", *draft("fusion=pointwise,on=model")),
            "other kernels or blocking collectives",
        ),
    ],
)
def test_what_makes_no_draft_is_refused(words: tuple[str, ...], text: str) -> None:
    ran = stagec("analyze", *words)
    assert ran.code in (1, 2)
    assert text in ran.err + ran.out
    assert "Traceback" not in ran.err


def test_positions_of_the_draft_model_are_warned_of() -> None:
    """It takes a word less than the other one: the last draft is not its own input."""
    words = ("llama3-8b", "--set", SMALL, "--serve", "decode", "--speculative", "4", *draft())
    ran = stagec("analyze", *words, "--context", "8190")
    assert "reaches position 8,195, beyond the 8,192" in ran.err
    assert "reaches position 8,194, beyond the 8,192" in ran.err
    assert "beyond" not in stagec("analyze", *words, "--context", "8187").err


def test_memory_is_reported_of_both_models() -> None:
    actual = expected("memory", *STEP, "--speculative", "2", "--tp", "2", *draft())["pods"]
    alone = expected(
        "memory", "llama3-8b", "--set", TINY, *TARGET[3:], "--context", f"{CONTEXT + 1}"
    )
    (mine,), (theirs,) = actual["draft"]["classes"], alone["classes"]
    assert mine["categories"]["caches"] == theirs["categories"]["caches"]
    assert actual["draft"]["model"] == "llama3-8b (draft)"


# -- time ------------------------------------------------------------------------------------------


def expected_tokens(rate: float, drafts: int) -> float:
    """By the outcomes: j drafts are right and the next one is not, or all are right."""
    some = sum((j + 1) * rate**j * (1 - rate) for j in range(drafts))
    return some + (drafts + 1) * rate**drafts


@pytest.mark.parametrize("more", [(), draft("tp=2")])
def test_a_token_takes_its_share_of_a_step(more: tuple[str, ...]) -> None:
    words = (*STEP, "--speculative", "3", "--machine", "h100-sxm", "--no-levers", *more)
    plain = expected("time", *words)
    step = plain["step_seconds"]
    assert plain["serving"] == {"mode": "decode", "tpot_seconds": step, "accepted": 1.0}
    some = expected("time", *words, "--accepted", "2.5")["serving"]
    assert some["tpot_seconds"] == pytest.approx(step / 2.5, rel=1e-12)
    for rate in (0.0, 0.7, 1.0):
        actual = expected("time", *words, "--acceptance", str(rate))["serving"]
        assert actual["accepted"] == pytest.approx(expected_tokens(rate, 3), rel=1e-12)
        assert actual["tpot_seconds"] == pytest.approx(step / actual["accepted"], rel=1e-12)
    assert "if no draft is right" in stagec("time", *words).out
    assert "2.53 tokens per sequence and step" in stagec("time", *words, "--acceptance", "0.7").out


def test_the_pods_take_turns() -> None:
    """One batch is drafted, then verified: the step is as long as both."""
    words = (*STEP, "--speculative", "3", "--machine", "h100-sxm", *draft("tp=2"), "--tp", "2")
    actual = expected("time", *words)
    alone = actual["alone_seconds"]
    assert set(alone) == {"main", "draft"}
    assert sum(alone.values()) * 0.98 < actual["step_seconds"] < sum(alone.values()) * 1.3


def test_a_server_gives_what_is_accepted() -> None:
    words = ("llama3-8b", "--set", SMALL, "--prompt", "32", "--machine", "h100-sxm")
    more = ("--batches", "1", "--speculative", "3")
    one, three = (
        expected("serve", *words, *more, "--accepted", count)["points"][0]["tpot"]
        for count in ("1", "3")
    )
    assert three == pytest.approx(one / 3, rel=1e-9)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--accepted", "2"), "needs drafts, which this step"),
        (("--speculative", "2", "--accepted", "4"), "more than the 3 tokens"),
        (
            ("--speculative", "2", "--accepted", "2", "--acceptance", "0.5"),
            "cannot be used together",
        ),
        (("--speculative", "2", "--accepted", "2", "--sweep", "tp=1,2"), "which has no TPOT"),
        (("--speculative", "2", "--acceptance", "1.5"), "--acceptance"),
        (("--speculative", "2", "--acceptance", "nan"), "--acceptance expects a number, found nan"),
        (("--speculative", "2", "--accepted", "inf"), "--accepted expects a number, found inf"),
    ],
)
def test_what_cannot_be_accepted_is_refused(words: tuple[str, ...], text: str) -> None:
    ran = stagec("time", *STEP, "--machine", "h100-sxm", *words)
    assert ran.code in (1, 2)
    assert text in ran.err


@pytest.mark.parametrize("model", ["whisper-large-v3", "t5-base"])
def test_model_flops_of_decode_are_those_of_the_step(model: str) -> None:
    """An encoder runs in the first step of prefill alone, and so do its words."""
    words = (model, "--set", "S=64", "--serve", "decode", "--batch", "8", "--context", "16")
    actual = expected("time", *words, "--machine", "h100-sxm", "--no-levers")
    assert actual["mfu"] == pytest.approx(actual["hfu"], rel=1e-3)
    assert actual["tokens"] == 8
