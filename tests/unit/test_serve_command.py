"""`stagec serve`: its figures are those of the two steps, put together by closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.serving_rates import (
    PodStep,
    colocated,
    disaggregated,
    steady_parts,
    steady_seconds,
)
from tests.support import LONG, Outcome, stagec
from tests.unit.test_time_pods import slow_network

#: Llama-3 8B, bf16: bytes of weights that a step of decode reads (all but the embedding), and
#: those of keys and values of a token.
WEIGHTS, A_TOKEN = 2 * (8_030_261_248 - 128_256 * 4096), 131_072
H100 = 3.35e12


def test_one_sequence_waits_for_nobody() -> None:
    """One at a time: a request takes its prefill and its steps, and so do tokens a second."""
    rates = colocated(PodStep(1, 0.4, 2), PodStep(1, 0.02, 2), 500)
    assert rates.tpot == pytest.approx(0.02)
    assert rates.latency == pytest.approx(0.4 + 499 * 0.02)
    assert rates.tokens_per_second == pytest.approx(500 / rates.latency)
    assert rates.per_rank == pytest.approx(rates.tokens_per_second / 2)


def test_a_cycle_has_all_prompts_and_all_steps() -> None:
    """Counted out: 8 sequences of 10 tokens, prompts two at a time: 4 steps of prefill, which
    give 8 of them, and 9 of decode make 80 tokens."""
    rates = colocated(PodStep(2, 0.3, 4), PodStep(8, 0.05, 4), 10)
    assert rates.tokens_per_second == pytest.approx(80 / (4 * 0.3 + 9 * 0.05))
    assert rates.tpot == pytest.approx(0.05 + 3 * 0.3 / 9)


def test_pods_keep_each_other_busy() -> None:
    """A pod that decodes 32 sequences of 101 tokens in 0.01 s a step ends 32 a second; one that
    takes 0.25 s for two prompts starts 8: four of them. Of whole pods the slower ones bound it."""
    steps = PodStep(2, 0.25, 4), PodStep(32, 0.01, 8)
    rates = disaggregated(*steps, 101)
    assert rates.prefill_pods == pytest.approx(4)
    assert rates.tokens_per_second == pytest.approx(3232)
    assert rates.per_rank == pytest.approx(3232 / (8 + 4 * 4))
    for pods, requests in (((4, 1), 32), ((6, 1), 32), ((3, 2), 24), ((9, 2), 64)):
        whole = disaggregated(*steps, 101, pods)
        assert whole.tokens_per_second == pytest.approx(101 * requests)
        ranks = pods[0] * 4 + pods[1] * 8
        assert whole.per_rank == pytest.approx(101 * requests / ranks)
        assert (whole.tpot, whole.prefill_pods) == (rates.tpot, rates.prefill_pods)


def test_a_pod_that_sends_for_longer_than_it_computes() -> None:
    """Caches of a prompt take 0.4 s of a link, the step 0.25 s: TTFT waits for what is left of
    them, and links say how many pods keep the other one busy."""
    rates = disaggregated(PodStep(2, 0.25, 4, 0.4, 0.2), PodStep(32, 0.01, 8), 101)
    assert rates.ttft == pytest.approx(0.45)
    assert rates.latency == pytest.approx(0.45 + 100 * 0.01)
    assert rates.prefill_pods == pytest.approx(32 * 0.4 / 2)
    assert rates.per_rank == pytest.approx(3232 / (8 + 6.4 * 4))


def test_the_slowest_of_the_stages_is_the_pace_of_all() -> None:
    """Two stages of 3 s and 4 s with messages of 2 s: 9 s from the first to the last, which is more
    than two of 4 s; of three stages of 4 s each takes its turn."""
    parts = {"matrix products": 4.0, "bubble": 4.0, "scheduler": 1.0}
    assert steady_seconds(parts, 9.0, 1) == 9.0
    assert steady_seconds(parts, 9.0, 2) == 9.0
    assert steady_seconds(parts, 9.0, 3) == 13.0
    waits = {"matrix products": 8.0, "scheduler": 1.0, "stages that wait": 2.0}
    assert steady_parts(parts, 11.0, 2) == waits
    assert sum(steady_parts(parts, 9.0, 3).values()) == 13.0


def test_stages_have_batches_smaller_than_they_are() -> None:
    """One sequence passes both stages, where nothing is before it; of two the slowest stage may
    be the pace; each has its caches."""
    words = ("--set", "L=4", "--pp", "2", "--batches")
    one, two, many = served(*words, "1,2,64")["points"]
    step = ("--serve", "decode", "--batch", "1", "--context", "576", "--microbatches", "1")
    ran = stagec("time", "llama3-8b", *words[:4], *step, "--machine", "h100-sxm", "--json")
    assert one["tpot"] == pytest.approx(json.loads(ran.out)["step_seconds"], rel=1e-9)
    assert one["tpot"] < two["tpot"] < many["tpot"] < 32 * one["tpot"]
    caches = 62 * (512 + 64) * A_TOKEN * 2 // 32
    assert many["memory_peak"] - two["memory_peak"] > caches


@pytest.mark.parametrize("ranks", [("--dp", "4"), ("--tp", "4", "--dp-attention")])
def test_groups_of_ranks_may_be_idle(ranks: tuple[str, ...]) -> None:
    """Steps of 1 and of 6 sequences on four groups of ranks are those of 4 and of 8."""
    actual = served("--set", "L=2", *ranks, "--batches", "1,4,6,8")
    one, four, six, eight = actual["points"]
    assert one["tpot"] == four["tpot"] < six["tpot"] <= eight["tpot"]
    assert one["memory_peak"] == four["memory_peak"] < six["memory_peak"] == eight["memory_peak"]
    assert one["per_rank"] == pytest.approx(four["per_rank"] / 4)
    assert [bool(p["cautions"]) for p in actual["points"]] == [True, False, True, False]
    assert "batch 6: its step is that of 8" in six["cautions"][0]


def test_batches_double_from_a_sequence_for_each_group_on() -> None:
    points = served("--set", "L=2", "--dp", "3")["points"]
    assert [p["batch"] for p in points] == [3 << i for i in range(len(points))]


def test_a_batch_that_is_refused_leaves_others_alone() -> None:
    draft = ("--draft", "llama3.2-1b: dp=2", "--speculative", "3", "--set", "L=2", "--dp", "2")
    ran = run(*draft, "--batches", "1,2")
    assert (ran.code, "remark: --batches 1 is left out: B = 1 does not" in ran.err) == (0, True)
    refused = run(*draft, "--batches", "1")
    assert (refused.code, "B = 1 does not divide" in refused.err) == (1, True)


def served(*more: str, model: str = "llama3-8b", machine: str = "h100-sxm") -> dict[str, Any]:
    ran = run(*more, "--json", model=model, machine=machine)
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


def run(*more: str, model: str = "llama3-8b", machine: str = "h100-sxm") -> Outcome:
    words = ("--machine", machine, "--prompt", "512", "--output-tokens", "128")
    return stagec("serve", model, *words, *more)


@pytest.mark.parametrize(("number", "text"), [("0.012", "12.00 ms"), ("30", "30.000 s")])
def test_a_limit_without_a_unit_is_in_seconds(number: str, text: str) -> None:
    """As in Python; the answer states it with its unit."""
    bare = run("--set", "L=1", "--batches", "1", "--tpot", number, "--ttft", "500ms")
    assert f"highest throughput per rank within TTFT 500.00 ms, TPOT {text}: " in bare.out
    assert bare.out == run("--set", "L=1", "--batches", "1", "--tpot", text, "--ttft", "0.5").out


def test_no_step_is_faster_than_its_bytes() -> None:
    """Decode reads the weights and the caches; an estimate is above that, and below three times."""
    actual = served("--batches", "1,16..64")
    for point in actual["points"]:
        bytes_ = WEIGHTS + point["batch"] * (512 + 64) * A_TOKEN
        step = 1 / point["per_user"] - max(0, point["batch"] - 1) * point["ttft"] / 128
        assert bytes_ / H100 < step < 3 * bytes_ / H100
    prefill = 2 * 512 * (WEIGHTS / 2 - 128_256 * 4096) / 989e12
    assert prefill < actual["points"][0]["ttft"] < 4 * prefill


def test_batches_double_while_they_fit() -> None:
    actual = served("--set", "L=2")
    batches = [p["batch"] for p in actual["points"]]
    assert batches == [1 << i for i in range(len(batches))]
    assert all(p["fits"] for p in actual["points"])
    more = [p["per_rank"] for p in actual["points"]]
    assert more == sorted(more)
    assert actual["best"] == actual["points"][-1]


def test_sequences_that_wait_have_no_caches() -> None:
    """Prompts of 64 sequences come faster than steps of 64 tokens take them: few decode, and those
    that wait take no memory; a step with prompts takes more than one that decodes."""
    words = ("--set", "L=2", "--prompt-steps", "beside", "--prompt", "512", "--output-tokens", "64")
    few = served(*words, "--step-tokens", "65", "--batches", "4,64")["points"]
    assert few[1]["memory_peak"] < few[0]["memory_peak"] + 60 * 512 * A_TOKEN // 32 * 2
    alone = served(*words[:2], "--batches", "4", "--serve", "disaggregated", "--decode", "tp=1")
    whole = served(*words, "--batches", "4")["points"][0]
    assert whole["memory_peak"] > alone["points"][0]["memory_peak"]


def test_limits_choose_among_batches() -> None:
    every = served("--batches", "1,8,64")["points"]
    limit = every[1]["tpot"] * 1.0001
    actual = served("--batches", "1,8,64", "--tpot", f"{limit * 1e3:.6f}ms")
    assert actual["best"]["batch"] == 8
    none = served("--batches", "1", "--ttft", "1us")
    assert none["best"] is None


def test_what_is_to_be_warned_of_is_said_once() -> None:
    """Prefill and decode reach a position each, whatever the chunks and batches."""
    ran = run("--set", "L=2", "--batches", "1,2", "--prompt", "9216", "--chunk", "1024")
    assert ran.code == 0
    warned = [line for line in ran.err.splitlines() if "warning" in line]
    assert len(warned) == 2
    assert "reaches position 9,216," in warned[0]
    assert "reaches position 9,281," in warned[1]


def test_a_prompt_in_chunks_reads_the_weights_again() -> None:
    whole, parts = served("--batches", "1"), served("--batches", "1", "--chunk", "128")
    assert parts["points"][0]["ttft"] > whole["points"][0]["ttft"]
    assert parts["points"][0]["tpot"] == whole["points"][0]["tpot"]


#: A product of the feed-forward of each layer, over the sequences of a batch of 8.
PRODUCT = "kind,dtype,extents,microseconds\nmatmul,bf16,1x8x4096x14336,{}\n"


@pytest.mark.parametrize(
    "pods", [(), ("--serve", "disaggregated", "--prefill", "tp=2", "--decode", "tp=1")]
)
def test_measured_kernels_win(pods: tuple[str, ...], tmp_path: Path) -> None:
    """A product that takes twice as long makes a step longer by once its time in each layer, and
    TPOT by as much as `stagec time` says of the step; TTFT, of other products, is as before."""
    table, page = tmp_path / "table.csv", tmp_path / "curve.html"
    how = ("--set", "L=2", "--measured", str(table))
    step = ("--serve", "decode", "--batch", "8", "--context", "576", "--no-levers", "--json")
    points, steps = list[dict[str, Any]](), list[float]()
    for microseconds in (200, 400):
        table.write_text(PRODUCT.format(microseconds))
        actual = served(*how, *pods, "--batches", "8", "--html", str(page))
        points += actual["points"]
        assert (actual["found"]["matched"], actual["found"]["interpolated"]) == (1, 0)
        timed = stagec("time", "llama3-8b", *how, *step, "--machine", "h100-sxm")
        steps.append(json.loads(timed.out)["step_seconds"])
    first, second = points
    assert second["tpot"] - first["tpot"] == pytest.approx(2 * 200e-6)
    assert second["tpot"] - first["tpot"] == pytest.approx(steps[1] - steps[0])
    assert second["ttft"] == first["ttft"]
    text = page.read_text()
    assert f"--measured {table} --html decode-8.html" in text
    assert "kernels and collectives: 1 matched, 0 interpolated, " in text


def test_without_measured_kernels_none_are_counted(tmp_path: Path) -> None:
    """Those that are measured without effect are remarked on, once."""
    assert "found" not in served("--set", "L=2", "--batches", "8")
    table = tmp_path / "table.csv"
    table.write_text(PRODUCT.replace("14336", "14337").format(200))
    ran = run("--set", "L=2", "--batches", "4,8", "--measured", str(table))
    assert "kernels and collectives:" not in ran.out
    assert ran.err.count("no kernel or collective of these steps was measured") == 1


def test_two_pods(tmp_path: Path) -> None:
    page = tmp_path / "curve.html"
    words = ("--serve", "disaggregated", "--prefill", "tp=2", "--decode", "tp=4,dp=2")
    actual = served(*words, "--batches", "8,32", "--html", str(page))
    assert actual["ranks"] == {"prefill": 2, "decode": 8}
    assert all(p["prefill_pods"] > 0 for p in actual["points"])
    text = page.read_text()
    assert "<svg" in text
    assert "://" not in text


def test_the_pod_that_prefills_must_fit_as_well() -> None:
    """It holds what `stagec memory` says of its step, with caches of the prompts on each stage; of
    a prompt in chunks those of the largest count, of which the last one has a token."""
    job = ("--serve", "disaggregated", "--decode", "tp=8", "--batches", "8")
    words = (*job, "--prefill", "tp=1", "--prompt")
    actual = served(*words, "1025", "--chunk", "512", model="llama3-70b")
    step = ("--serve", "prefill", "--batch", "1", "--prompt", "512", "--context", "512", "--json")
    (held,) = json.loads(stagec("memory", "llama3-70b", *step).out)["classes"]
    assert actual["prefill_fit"]["peak"] == held["peak"]
    assert not actual["prefill_fit"]["fits"]
    assert actual["best"] is None
    (point,) = actual["points"]
    assert (point["fits"], point["fit"]["fits"]) == (False, True)
    assert "in the pod that prefills needs" in actual["cautions"][0]
    refused = run(*words, "1025", "--batches", "", model="llama3-70b")
    assert refused.code == 2
    alone = run(*(w for w in words[:-1] if w not in ("--batches", "8")), model="llama3-70b")
    assert (alone.code, "split the model with --prefill tp=2, or" in alone.err) == (1, True)
    one, two = (
        served(*job, "--prefill", f"tp=2{pp}", model="llama3-70b")["prefill_fit"]["peak"]
        for pp in ("", ",pp=2")
    )
    assert 0 < two - one // 2 < 2 << 30


@LONG
@pytest.mark.parametrize(
    ("prefill", "decode", "sequences", "tokens"),
    [
        ("tp=2", "tp=4,dp=2", 1, 4),
        ("dp=2", "pp=2,microbatches=4", 2, 2),
        ("tp=2", "tp=2,dp=2,ep=2", 1, 2),
    ],
)
def test_ttft_has_what_is_left_of_the_caches(
    prefill: str, decode: str, sequences: int, tokens: int, tmp_path: Path
) -> None:
    """On a network that is slow by a factor of 1,000 the link of a rank is never idle behind the
    first layer. A prompt goes to the ranks of one group, whatever the pod that decodes, and its
    token to each of them that begins with it."""
    model = "mixtral-8x7b" if "ep" in decode else "llama3-8b"
    pods = ("--prefill", prefill, "--decode", decode)
    words = ("--serve", "disaggregated", "--set", "L=4", "--batches", "8", *pods)
    usual = served(*words, model=model)
    slow = served(*words, model=model, machine=str(slow_network(tmp_path, 1000)))
    for actual in (usual, slow):
        sent, ttft = actual["handover"], actual["points"][0]["ttft"]
        assert sent["bytes"] == sequences * 512 * 4 * 2 * 8 * 128 * 2 + 4 * tokens
        assert sent["alone_seconds"] >= sent["exposed_seconds"]
        assert ttft - sent["exposed_seconds"] == pytest.approx(_step(prefill, model), rel=1e-12)
    assert slow["handover"]["exposed_seconds"] > 0.7 * slow["handover"]["alone_seconds"]
    assert slow["points"][0]["prefill_pods"] > 10 * usual["points"][0]["prefill_pods"]


def _step(strategy: str, model: str, layers: int = 4) -> float:
    """Seconds of the step of prefill by itself."""
    flag, _, degree = strategy.partition("=")
    batch = degree if flag == "dp" else "1"
    given = ("--serve", "prefill", "--batch", batch, "--prompt", "512", "--set", f"L={layers}")
    ran = stagec("time", model, *given, f"--{flag}", degree, "--machine", "h100-sxm", "--json")
    return float(json.loads(ran.out)["step_seconds"])


def test_prompts_in_chunks_are_handed_over_with_the_last_one() -> None:
    words = ("--serve", "disaggregated", "--prefill", "tp=2", "--decode", "tp=2", "--batches", "8")
    whole, parts = served(*words), served(*words, "--chunk", "128")
    assert parts["handover"]["bytes"] == whole["handover"]["bytes"]
    assert parts["points"][0]["ttft"] > whole["points"][0]["ttft"]


@LONG
def test_a_draft_model_has_ranks_of_its_own() -> None:
    """A step of decode is that of both models, which wait for each other; tokens are those of all
    ranks. A draft model that takes longer for a prompt is what prompts wait for."""
    pods = ("--set", "L=4", "--tp", "2", "--speculative", "2", "--draft", "llama3-8b[L=2]: dp=1")
    given = ("--accepted", "2", "--machine", "h100-sxm", "--json")
    (point,) = served(*pods, "--accepted", "2", "--batches", "8")["points"]
    step = ("--serve", "decode", "--batch", "8", "--context", str(512 + 128 // 2))
    ran = stagec("time", "llama3-8b", *pods, *step, *given, "--no-levers")
    decode = json.loads(ran.out)["serving"]["tpot_seconds"]
    assert point["tpot"] == pytest.approx(decode + 7 * point["ttft"] / 127, rel=1e-12)
    assert point["per_rank"] == pytest.approx(point["tokens_per_second"] / 3, rel=1e-12)
    assert point["ttft"] == pytest.approx(_step("tp=2", "llama3-8b"), rel=1e-12)
    slow = (*pods[:-1], "llama3-8b[L=16]: dp=1")
    (late,) = served(*slow, "--accepted", "2", "--batches", "8")["points"]
    assert late["ttft"] > point["ttft"]


@pytest.mark.parametrize("ranks", ["tp=2", "on=model"])
def test_prompts_of_a_draft_model_take_memory_and_are_loaded(ranks: str) -> None:
    """A step that prefills has the caches of all sequences, as without drafts, and on the same
    ranks the weights of both models; cached tokens of both are loaded, 64 GB/s from the host."""
    load = ("--prompt", "2000", "--output-tokens", "50", "--batches", "4", "--context", "1000")
    model = ("--set", "L=4", "--tp", "2", *load, "--speculative", "2")
    draft = ("--draft", f"llama3-8b[L=2]: {ranks}")
    alone, both = (served(*model, *more)["points"][0] for more in ((), draft))
    far = served(*model, *draft, "--context-from", "host")["points"][0]
    row = 2 * 2 * 4 * 128  # keys and values of a layer, four heads of 128 in two bytes
    layers = 4 + 2 * (ranks == "on=model")
    assert far["ttft"] - both["ttft"] == pytest.approx(1000 * layers * row / 64e9, rel=0.01)
    more = both["memory_peak"] - alone["memory_peak"]
    if ranks == "on=model":
        whole = 2 * (2 * (218112000 + 8192) + 2 * 128256 * 4096 + 4096) / 2
        assert more == pytest.approx(whole + 4 * 3050 * 2 * row, rel=0.05)
    else:
        assert more == pytest.approx(0, abs=1 << 20)


def test_stages_verify_the_drafts_of_other_ranks() -> None:
    """One microbatch at a time, as without drafts."""
    load = ("--prompt", "500", "--output-tokens", "20", "--batches", "4")
    model = ("--set", "L=4", "--pp", "2", *load, "--speculative", "2", "--draft")
    assert served(*model, "llama3-8b[L=2]: tp=1")["points"][0]["batch"] == 4


def test_a_draft_model_on_the_ranks_of_its_model_prefills_behind_it() -> None:
    pods = (
        "--set",
        "L=4",
        "--tp",
        "2",
        "--speculative",
        "2",
        "--draft",
        "llama3-8b[L=2]: on=model",
    )
    actual = served(*pods, "--accepted", "2", "--batches", "8")
    (point,) = actual["points"]
    assert actual["ranks"] == {"prefill": 2, "decode": 2}
    both = _step("tp=2", "llama3-8b"), _step("tp=2", "llama3-8b", 2)
    assert point["ttft"] == pytest.approx(sum(both), rel=1e-12)


@LONG
@pytest.mark.parametrize("apart", [False, True])
def test_an_encoder_has_ranks_of_its_own(apart: bool) -> None:
    """TTFT is that of `stagec time` of these pods: encoder and prefill wait for each other."""
    pods = ("--serve", "disaggregated", "--prefill", "tp=2", "--decode", "tp=2")
    pods = (*(pods if apart else ("--tp", "2")), "--part", "encoder=e: dp=2")
    sizes = ("--set", "L=2,L_dec=2", "--prompt", "64")
    actual = served(*pods, *sizes, "--batches", "4", model="whisper-large-v3")
    assert actual["ranks"] == {"prefill": 4, "decode": 2 if apart else 4}
    step = (*pods, *sizes, *(() if apart else ("--serve", "prefill")), "--batch", "2", "--json")
    ran = stagec("time", "whisper-large-v3", *step, "--machine", "h100-sxm", "--no-levers")
    assert ran.code == 0, ran.err
    reported = json.loads(ran.out)
    (point,) = actual["points"]
    assert point["ttft"] == pytest.approx(reported["serving"]["ttft_seconds"], rel=1e-12)
    if apart:
        assert actual["handover"] == reported["handover"]
    else:
        assert point["per_rank"] == pytest.approx(point["tokens_per_second"] / 4, rel=1e-12)


def test_an_encoder_runs_with_the_first_chunk() -> None:
    """TTFT is a step of both pods, and one of the rest of the model behind it."""
    model, part = "whisper-large-v3", ("--part", "encoder=e: tp=1")
    sizes = ("--set", "L=1,L_dec=1")
    words = ("--prompt", "16", "--chunk", "8", "--batches", "4")
    actual = served(*sizes, *part, *words, model=model)
    assert actual["ranks"]["prefill"] == 2
    step = (*sizes, "--serve", "prefill", "--batch", "1", "--prompt", "8")
    each = [
        json.loads(stagec("time", model, *step, *more, "--machine", "h100-sxm", "--json").out)
        for more in (part, ("--context", "8"))
    ]
    seconds = sum(reported["step_seconds"] for reported in each)
    assert actual["points"][0]["ttft"] == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--serve", "disaggregated", "--draft", "llama3-8b"),
            "cannot be used together: both add pods",
        ),
        (
            ("--serve", "disaggregated", "--part", "encoder=e", "--chunk", "4"),
            "the encoder runs with the first",
        ),
        (("--draft", "llama3-8b"), "needs --speculative"),
        (("--serve", "decode"), "is one step"),
        (("--batch", "4"), "takes --batches"),
        (("--tpot", "30 m"), "expects a time such as 30ms"),
        (("--batches", "0"), "expects batches such as"),
        (("--batches", "9" * 5000), "expects batches such as"),
        (("--tp", "3"), ""),
        (("--measured", "none.csv"), "none.csv: No such file"),
        (("--kernels-from", "vidur"), "is not one of 'aiconfigurator'"),
        (("--set", "D=65536,F=229376"), "no batch fits: a batch of 1 needs"),
        # h100-500w has 96 GiB too, but slower memory
        (("--set", "L=200,F=16000"), "or give --machine gh200"),
    ],
)
def test_what_is_wrong_is_reported(words: tuple[str, ...], says: str) -> None:
    ran = run(*words)
    assert ran.code in (1, 2)
    assert says in ran.err
    assert "Traceback" not in ran.err
    assert "bug" not in ran.err


@pytest.mark.parametrize(("flags", "speed"), [(("host",), 64e9), (("disk", 6.8), 6.8e9)])
@pytest.mark.parametrize("tp", [1, 2])
def test_cached_tokens_come_from_where_they_are_kept(
    tp: int, flags: tuple[Any, ...], speed: float
) -> None:
    """Over the link of the host, PCIe 5.0, or as fast as the disk reads; TPOT stays."""
    words = ("llama3-8b", "--prompt", "500", "--context", "4000", "--batches", "2")
    asked = ("serve", *words, "--tp", str(tp), "--machine", "h100-sxm", "--json")
    where, *disk = flags
    given = ("--context-from", where, *(("--disk-bandwidth", str(*disk)) if disk else ()))
    (plain,), (loaded,) = (json.loads(stagec(*asked, *f).out)["points"] for f in ((), given))
    for name in ("ttft", "latency"):
        assert loaded[name] - plain[name] == pytest.approx(4000 * A_TOKEN / tp / speed)
    assert loaded["tpot"] == plain["tpot"]


def test_engines_keep_to_their_share_of_the_memory() -> None:
    """vLLM takes 9/10 of it. With room for all tokens of a request, caches of 1,024 + 8,192 - 1
    tokens count, of which steps have 1,024 + 4,096 on average."""
    job = ("serve", "llama3-8b", "--machine", "h100-sxm", "--batches", "8", "--json", "--prompt")
    each = {
        how: json.loads(stagec(*job, "1024", "--output-tokens", "8192", *how.split()).out)
        for how in ("", "--server-memory 9/10", "--reserve-outputs")
    }
    plain, share, reserved = (answer["points"][0]["fit"] for answer in each.values())
    assert share["room"] == int(plain["room"] * 9 // 10)
    assert share["peak"] == plain["peak"]
    assert reserved["room"] == plain["room"]
    assert reserved["peak"] - plain["peak"] == 8 * 4095 * A_TOKEN
