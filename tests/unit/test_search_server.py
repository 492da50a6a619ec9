"""`stagec search --serve server`: steady states, whole pools, the front, and launch files."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagec as library
from stagec.analysis.serving_rates import PodStep, chunked
from stagec.analysis.steady_server import chunks, matched
from stagec.ir.expr import const
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.request.options import JobOptions
from stagec.searches.server.answer import ServerSearchAnswer
from stagec.searches.server.launch import ENGINES, VLLM_RANKS, LaunchedWorker, layout_of
from tests.support import LONG, stagec

SMALL: Mapping[str, Any] = {
    "sizes": {"L": 2},
    "ranks": 2,
    "machine": "h100-sxm",
    "prompt": 500,
    "output_tokens": 50,
    "batch": (4, 16),
    "pp": 1,
    "dp_attention": False,
    "jobs": 1,
    "verify": 0,
}
WORDS = ["search", "llama3-8b", "--serve", "server", "--set", "L=2", "--jobs", "1", "--verify", "0"]


def actual(**more: Any) -> Mapping[str, Any]:
    return answer_of(**more).as_json()


def answer_of(**more: Any) -> ServerSearchAnswer:
    return library.search("llama3-8b", serve="server", **{**SMALL, **more})


# -- steady states ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("sequences", "budget"), [(1, 64), (8, 64), (12, 64), (3, 4096)])
def test_prompts_are_computed_as_fast_as_they_come(sequences: int, budget: int) -> None:
    prompt, output = 100, 50
    work = chunks(sequences, budget, prompt, output)
    assert work is not None
    assert sequences + work.size * work.prompts <= budget
    assert 0 < work.share <= 1
    pods = PodStep(sequences, 1.0, 1), PodStep(work.prompts, 3.0, 1, request=0.25)
    steady = chunked(*pods, work, output)
    # Little's law, of sequences that decode or whose prompt makes others wait; and prompts that are
    # computed are those that come
    requests = steady.tokens_per_second / output
    own = (output - 1) * work.share / sequences * 2.0
    assert requests * ((output - 1) * steady.tpot + own) == pytest.approx(sequences)
    computed = work.share * work.prompts / work.steps / (1 + 2 * work.share)
    assert computed == pytest.approx(requests)
    assert steady.ttft == 0.25 + 3 * work.steps


@pytest.mark.long
def test_prompts_alone_take_a_step_more() -> None:
    """As 'stagec serve' has it, but for a sequence's own prompt, a part of the batch."""
    load: dict[str, Any] = {"prompt": 500, "output_tokens": 50, "batch": "16"}
    beside, alone = (
        next(
            row["tpot"]
            for row in actual(prompt_steps=how, **load)["best"]
            if row["mode"] == "aggregated"
        )
        for how in ("beside", "alone")
    )
    assert alone > beside


def test_prompts_that_come_too_fast_have_no_steady_state() -> None:
    assert chunks(64, 64, 100, 50) is None
    for sequences, budget in ((60, 64), (200, 300)):  # of the latter four are needed, one fits
        work = chunks(sequences, budget, 100, 50)
        assert work is not None
        assert not work.keeps_up


def test_pools_are_those_of_all_numbers_of_workers() -> None:
    source = random.Random(7)
    for _ in range(200):
        ranks = source.randrange(1, 40)
        of_prefill, of_decode = source.randrange(1, 9), source.randrange(1, 9)
        prefill, decode = source.uniform(0.1, 9), source.uniform(0.1, 9)
        pools = matched(ranks, of_prefill, of_decode, prefill, decode)
        rates = [
            min(x * prefill, y * decode)
            for x in range(1, ranks + 1)
            for y in range(1, ranks + 1)
            if x * of_prefill + y * of_decode <= ranks
        ]
        if not rates:
            assert pools is None
            continue
        assert pools is not None
        assert pools.prefill * of_prefill + pools.decode * of_decode <= ranks
        assert pools.requests == pytest.approx(max(rates))
        more = pools.filled(ranks, of_prefill, of_decode)
        assert more.requests == pools.requests
        left = ranks - more.prefill * of_prefill - more.decode * of_decode
        assert 0 <= left < min(of_prefill, of_decode)
        assert more.prefill >= pools.prefill
        assert more.decode >= pools.decode


# -- a search --------------------------------------------------------------------------------------


#: A product of the feed-forward of each layer, over the sequences of a batch of 16.
PRODUCT = "kind,dtype,extents,microseconds\nmatmul,bf16,1x16x4096x14336,{}\n"


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_measured_kernels_are_those_of_the_command(mode: str, tmp_path: Path) -> None:
    """A product of two layers is slower by 200 us; the step is that of the command."""
    table, rows = tmp_path / "table.csv", list[Mapping[str, Any]]()
    for microseconds in (200, 400):
        table.write_text(PRODUCT.format(microseconds))
        data = actual(tp=1, batch=(16,), measured=(table,), verify=1)
        rows.append(data["modes"][mode])
        assert data["found"]["matched"] > 0
    fast, slow = rows
    assert slow["decode"]["step_seconds"] - fast["decode"]["step_seconds"] == pytest.approx(400e-6)
    assert f"--measured {table}" in slow["command"]
    served = json.loads(stagec(*shlex.split(slow["command"])[1:], "--json").out)["points"][0]
    assert served["tpot"] == pytest.approx(slow["tpot"], rel=1e-9)
    with pytest.raises(library.DiagnosticError, match="table2"):
        actual(measured=(tmp_path / "table2.csv",))


@pytest.mark.long
def test_the_best_is_the_best_of_the_front_and_its_command_times_it(tmp_path: Path) -> None:
    data = actual()
    best, front = data["best"][0], data["front"]
    assert best["per_rank"] == pytest.approx(max(row["per_rank"] for row in front), rel=0.02)
    rates = [(row["per_user"], row["per_rank"]) for row in front]
    assert rates == sorted(rates, key=lambda r: (-r[0], r[1]))
    for row in [*data["best"], *front]:
        assert sum(row["parts"].values()) * row["per_rank"] == pytest.approx(1)
        used = sum(row[p]["ranks"] * row[p]["replicas"] for p in ("prefill", "decode") if row[p])
        assert used + row["idle_ranks"] == row["ranks"] == 2
        assert (row["prefill"] is None) == (row["mode"] == "aggregated")
    two = data["modes"]["disaggregated"]
    served = json.loads(stagec(*shlex.split(two["command"])[1:], "--json").out)
    assert served["points"][0]["tpot"] == pytest.approx(two["tpot"], rel=1e-9)
    assert served["points"][0]["ttft"] == pytest.approx(two["ttft"], rel=1e-9)


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_prompts_may_go_on_behind_what_is_cached(mode: str) -> None:
    """As in the command that times the workers of the best; without a cache for prefixes a prompt
    of as many tokens takes longer to its first token."""
    flags = {"tp": 1, "batch": 4, "prompt": 100}
    best = actual(**flags, context=400)["modes"][mode]
    assert "--context 400" in best["command"]
    served = json.loads(stagec(*shlex.split(best["command"])[1:], "--json").out)
    if mode == "disaggregated":
        assert served["points"][0]["tpot"] == pytest.approx(best["tpot"], rel=1e-9)
        assert served["points"][0]["ttft"] == pytest.approx(best["ttft"], rel=1e-6)
    assert best["ttft"] < actual(**{**flags, "prompt": 500})["modes"][mode]["ttft"]


@pytest.mark.long
def test_steps_that_decode_may_verify_drafts() -> None:
    """Tokens of a step divide its seconds, as in the command that times the best server. Steps
    that prefill beside decode have no drafts, so other ranks prefill."""
    flags = {"sizes": {"L": 2}, "tp": 1, "batch": 4, "speculative": 3}
    data = actual(**flags, acceptance=0.7)
    (best,) = {row["mode"]: row for row in data["best"]}.values()
    assert best["mode"] == "disaggregated"
    assert "--speculative 3" in best["command"]
    served = json.loads(stagec(*shlex.split(best["command"])[1:], "--json").out)
    assert served["points"][0]["tpot"] == pytest.approx(best["tpot"], rel=1e-9)
    none_right = actual(**flags)["best"][0]
    accepted = sum(0.7**i for i in range(4))
    assert none_right["tpot"] == pytest.approx(best["tpot"] * accepted)
    assert sum(best["parts"].values()) * best["per_rank"] == pytest.approx(1)


@pytest.mark.long
def test_limits_hold_and_a_tighter_one_gives_no_more() -> None:
    free = actual()["best"][0]
    kept = actual(tpot=0.9 * free["tpot"], ttft=1.0)
    assert all(row["tpot"] <= 0.9 * free["tpot"] for row in kept["best"])
    assert all(row["ttft"] <= 1.0 for row in [*kept["best"], *kept["front"]])
    assert kept["best"][0]["per_rank"] <= free["per_rank"]
    assert sum(n for why, n in kept["cut"].items() if "limits of time" in why) > 0


def test_more_ranks_give_no_fewer_tokens() -> None:
    data = actual(ranks="1..4", tp=1, batch=(16,))
    totals = [row["best"]["tokens_per_second"] for row in data["searches"]]
    assert [row["ranks"] for row in data["searches"]] == [1, 2, 4]
    assert totals == sorted(totals)
    assert data["searches"][0]["best"]["mode"] == "aggregated"  # two pools need two ranks


def test_feed_forward_may_have_ranks_of_its_own() -> None:
    """Workers of up to all ranks, each with the figures of its command. Ranks of feed-forward
    count, and send no caches, so such workers do not prefill for others."""
    part = {"part": "ffn=feed-forward: on-machine=h200", "top": 50, "batch": (16,)}
    rows = actual(ranks=3, **part)["best"]
    apart = [row for row in rows if "ffn" in row["decode"]["strategy"]]
    sizes = {row["decode"]["ranks"] for row in apart}
    assert sizes == {2, 3}
    assert not any("ffn" in row["prefill"]["strategy"] for row in rows if row["prefill"])
    alone = [row for row in apart if row["mode"] == "aggregated"]
    assert {row["mode"] for row in apart} == {"aggregated", "disaggregated"}
    for row in alone:
        assert row["decode"]["ranks"] * row["decode"]["replicas"] + row["idle_ranks"] == 3
        assert sum(row["parts"].values()) * row["per_rank"] == pytest.approx(1)
    for row in apart:
        served = json.loads(stagec(*shlex.split(row["command"])[1:], "--json").out)["points"][0]
        assert served["tpot"] == pytest.approx(row["tpot"], rel=1e-9)
        assert served["ttft"] == pytest.approx(row["ttft"], rel=1e-9)
    # parts of a batch that take turns are the sequences of one group of ranks over time
    (over,) = (r for r in actual(**part, verify=9)["best"] if "ffn" in r["decode"]["strategy"])
    assert over["over_time"]["per_rank"] == pytest.approx(over["per_rank"], rel=0.2)
    fixed = actual(ranks=3, part="ffn=feed-forward: tp=2", top=50, batch=(16,))["best"]
    assert {r["decode"]["ranks"] for r in fixed if "ffn" in r["decode"]["strategy"]} == {3}


def test_two_stages_are_searched_where_attention_may_be_apart() -> None:
    flags: dict[str, Any] = {"sizes": {"L": 2, "E": 4}, "afd": (True, False), "top": 50}
    load: dict[str, Any] = {"prompt": 500, "output_tokens": 50, "machine": "h100-sxm"}
    how: dict[str, Any] = {"ranks": 2, "batch": (16,), "jobs": 1, "verify": 0}
    best = library.search("mixtral-8x7b", serve="server", **flags, **load, **how).as_json()["best"]
    assert any("--afd" in row["decode"]["strategy"] for row in best)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"part": "x=y: tp=2"}, "but for feed-forward"),
        ({"part": "x=feed-forward: on-machine=h20", "price": (2.0,)}, "--price is that of ranks"),
    ],
)
def test_parts_that_no_worker_has_are_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(library.DiagnosticError, match=text):
        actual(**flags)


def test_pools_may_be_on_machines_that_are_unlike() -> None:
    # a machine for prompts that costs little, and one for decode that reads fast
    about = {"machine": "h100-sxm,h200", "price": (2.0, 3.0), "tp": 1, "prompt": 2000}
    data = actual(**about, objective="cost", top=50)
    machines = {
        (row["prefill"]["machine"], row["decode"]["machine"])
        for row in data["best"]
        if row["prefill"] is not None
    }
    assert any(prefill != decode for prefill, decode in machines)
    costs = [row["cost"] for row in data["best"]]
    assert costs == sorted(costs)
    for row in data["best"]:
        prices = {"h100-sxm": 2.0, "h200": 3.0}
        pools = [row[p] for p in ("prefill", "decode") if row[p] is not None]
        hourly = sum(p["ranks"] * p["replicas"] * prices[p["machine"]] for p in pools)
        assert row["cost"] == pytest.approx(hourly / 3600 / row["tokens_per_second"] * 1e6)


def test_files_of_one_name_are_two_machines(tmp_path: Path) -> None:
    prices: dict[str, float] = {}
    for base, price in (("h100-sxm", 2.0), ("h200", 3.0)):
        file = tmp_path / base / "mine.toml"
        file.parent.mkdir()
        file.write_text(f'base = "{base}"\n')
        prices[str(file)] = price
    data = actual(machine=[*prices], price=tuple(prices.values()), tp=1, top=50)
    pools = [row[p] for row in data["best"] for p in ("prefill", "decode") if row[p] is not None]
    assert {pool["machine"] for pool in pools} == {*prices}
    for row in data["best"]:
        mine = [row[p] for p in ("prefill", "decode") if row[p] is not None]
        hourly = sum(p["ranks"] * p["replicas"] * prices[p["machine"]] for p in mine)
        assert row["cost"] == pytest.approx(hourly / 3600 / row["tokens_per_second"] * 1e6)


@pytest.mark.long
def test_stacks_and_formats_of_weights_are_searched() -> None:
    about = {"stack": "vllm,sglang", "weight_dtype": ("bf16", "fp8"), "batch": (4,), "tp": 1}
    data = actual(**about, top=50)
    stacks = {row["decode"]["stack"] for row in data["best"]}
    assert stacks == {"vllm", "sglang"}
    assert all(
        row["prefill"]["stack"] == row["decode"]["stack"] for row in data["best"] if row["prefill"]
    )
    assert {"fp8" in row["decode"]["strategy"] for row in data["best"]} == {True, False}


def test_page_table_and_columns(tmp_path: Path) -> None:
    answer = answer_of(tp=1, batch=(4,))
    page = answer.page()
    assert "tokens/s per user" in page
    assert "<svg" in page
    header, *rows = answer.as_csv().splitlines()
    assert header.startswith("mode,ranks,per_rank")
    assert len(rows) == len(answer.best)
    assert "aggregated: " in str(answer)
    assert "disaggregated: " in str(answer)


# -- over time -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("pp", [1, 2])
def test_a_closed_loop_is_near_the_steady_state(pp: int) -> None:
    data = actual(ranks=2 * pp, tp=1, pp=pp, batch=(16,), verify=2, output_tokens=200)
    assert {row["mode"] for row in data["best"][:2]} == {"aggregated", "disaggregated"}
    for row in data["best"][:2]:
        over = row["over_time"]
        # Little's law, of the steady state
        seconds = row["ttft"] + 199 * row["tpot"]
        assert over["concurrency"] == round(row["requests_per_second"] * seconds)
        assert over["requests"] == 2 * over["concurrency"]
        # of few sequences whose lengths differ, some are at times where they wait
        assert 0.8 < over["per_rank"] / row["per_rank"] < 1.05
        assert over["tpot"]["mean"] == pytest.approx(row["tpot"], rel=0.1)
        assert over["ttft"]["p50"] >= 0.9 * row["ttft"]
    assert actual(tp=1, batch=(16,))["best"][0]["over_time"] is None


@pytest.mark.long
def test_servers_that_miss_a_limit_over_time_are_behind_the_others() -> None:
    free = actual(tp=1, batch=(4, 16))["best"]
    limit = max(row["ttft"] for row in free[:2]) * 1.001
    answer = answer_of(tp=1, batch=(4, 16), verify=2, ttft=limit)
    best = answer.as_json()["best"]
    checked = [row for row in best if row["over_time"] is not None]
    late = [row["over_time"]["ttft"]["p50"] > 1.05 * limit for row in checked]
    assert any(late)
    assert late == sorted(late)
    assert [bool(row["over_time"]["missed"]) for row in checked] == late
    assert ["TTFT over time" in row["reason"] for row in checked] == late
    assert "In a closed loop over time" in str(answer)
    assert "<h2>In a closed loop over time</h2>" in answer.page()
    single = answer_of(tp=1, batch=(4, 16), verify=1, ttft=limit).as_json()["best"]
    ran = [row["over_time"] for row in single if row["over_time"] is not None]
    assert len(ran) == len(single) > 1 or not ran[0]["missed"], "until one keeps the limits"


@LONG
def test_a_limit_of_memory_holds_over_time() -> None:
    """Longer requests than the mean do not all fit beside each other where its batch just does."""
    how: dict[str, Any] = {"tp": 1, "batch": (16,), "verify": 2, "output_tokens": 200}
    free = next(row for row in actual(**how)["best"] if row["mode"] == "disaggregated")
    peak = max(free[pool]["memory_peak"] for pool in ("prefill", "decode"))
    tight = next(
        row
        for row in actual(**how, limit=f"{peak / 2**30:.6f}GiB")["best"]
        if row["mode"] == "disaggregated"
    )
    assert tight["decode"] == {**free["decode"], "room": tight["decode"]["room"]}
    assert tight["over_time"]["per_rank"] < free["over_time"]["per_rank"]


@LONG
def test_why_a_server_does_not_run_over_time_is_said() -> None:
    rows = actual(ranks=1, batch=(4,), verify=1, context=256)["best"]
    why = "a closed loop has no requests with a common prefix"
    assert rows[0]["over_time"]["refused"] == why


def test_a_server_on_stages_has_the_figures_of_its_command() -> None:
    """A step is one microbatch, others are on the other stages, whose caches are counted too."""
    rows = actual(ranks=2, pp=2, tp=1, batch=(16,), stack="vllm")["best"]
    best = next(row for row in rows if row["mode"] == "aggregated")
    reported = json.loads(stagec(*shlex.split(best["command"])[1:], "--json").out)["points"][0]
    assert reported["batch"] == best["decode"]["batch"] == 16
    assert reported["per_rank"] == pytest.approx(best["per_rank"], rel=1e-9)
    assert reported["tpot"] == pytest.approx(best["tpot"], rel=1e-9)
    assert reported["memory_peak"] == best["decode"]["memory_peak"]


QUESTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "stages of both pods": ("llama3-8b", {"pp": 2, "tp": 1, "ranks": 4, "ttft": "1s"}),
    "prompts behind cached tokens": ("llama3-8b", {"tp": 2, "context": 256, "stack": "vllm"}),
    "groups with sequences of their own": (
        "qwen3-30b-a3b",
        {"tp": 2, "dp_attention": True, "context": 256},
    ),
    "chunks by turns": ("llama3-8b", {"prompt": 1500, "chunk": 512, "stack": "sglang"}),
    "a budget and types": (
        "mixtral-8x7b",
        {"chunk": 512, "stack": "trtllm", "weight_dtype": "fp8", "kv_dtype": "fp8", "page": 16},
    ),
    "room for all tokens": (
        "gpt-1.7b",
        {"tp": 1, "reserve_outputs": True, "prompt": 100, "context": 300, "output_tokens": 300},
    ),
    "drafts": ("qwen3-30b-a3b", {"speculative": 2, "accepted": "2.5", "output_tokens": 200}),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_the_command_of_a_server_gives_its_figures(case: str) -> None:
    model, how = QUESTIONS[case]
    data = library.search(model, serve="server", **{**SMALL, "dp_attention": None, **how}).as_json()
    rows = [*data["best"][:1], *filter(None, data["modes"].values())]
    for row in {row["command"]: row for row in rows}.values():
        ran = stagec(*shlex.split(row["command"])[1:], "--json")
        assert ran.code == 0, ran.err
        (point,) = json.loads(ran.out)["points"]
        used = row["ranks"] - row["idle_ranks"]
        assert point["ttft"] == pytest.approx(row["ttft"], rel=1e-9)
        assert point["tpot"] == pytest.approx(row["tpot"], rel=1e-9)
        assert point["per_rank"] == pytest.approx(row["per_rank"] * row["ranks"] / used, rel=1e-9)
        assert point["memory_peak"] == row["decode"]["memory_peak"]
        assert point["batch"] == row["decode"]["batch"]


# -- launch files ----------------------------------------------------------------------------------


def worker(role: str, **flags: Any) -> LaunchedWorker:
    options = JobOptions("deepseek-v3", weight_dtype="fp8", kv_dtype="fp8", **flags)
    layout, rule = layout_of(options, experts=True), SchedulerRule(memory=const(9) / 10)
    return LaunchedWorker(role, 2, layout, 64, 8192, 4500, options, rule, 256)


def test_layouts_of_workers() -> None:
    wide = layout_of(JobOptions("m", dp=4, ep=8, tp=2, etp=1, dp_attention=True), experts=True)
    assert (wide.tp, wide.dp, wide.ep, wide.moe_tp, wide.problem) == (1, 8, 8, 1, "")
    plain = JobOptions("m")
    whole = layout_of(JobOptions("m", tp=8, ep=8), experts=True)
    assert (whole.tp, whole.dp, whole.ep, whole.moe_tp, whole.problem) == (8, 1, 8, 1, "")
    assert not any(engine.lacks(whole, plain) for engine in ENGINES.values())
    some = layout_of(JobOptions("m", tp=8, ep=2), experts=True)
    assert (some.tp, some.ep, some.moe_tp, some.problem) == (8, 2, 4, "")
    mixed = layout_of(JobOptions("m", dp=2, ep=2, tp=4), experts=True)
    assert (mixed.tp, mixed.dp, mixed.ep, mixed.moe_tp) == (4, 2, 2, 4)
    assert ENGINES["vllm"].lacks(mixed, plain)
    assert ENGINES["trtllm"].lacks(mixed, plain)
    assert not ENGINES["sglang"].lacks(mixed, plain)
    copied = layout_of(JobOptions("m", tp=4, etp=1, dp_attention=True), experts=True)
    assert all(engine.lacks(copied, plain) for engine in ENGINES.values())
    dense = layout_of(JobOptions("m", tp=4, dp_attention=True), experts=False)
    assert all(engine.lacks(dense, plain) for engine in ENGINES.values())
    assert not any(
        e.lacks(layout_of(JobOptions("m", tp=4), experts=False), plain) for e in ENGINES.values()
    )


def test_whole_experts_on_the_ranks_of_tp_are_searched_once() -> None:
    given: dict[str, Any] = {"sizes": {"L": 2}, "stack": "vllm", "ranks": 2, "batch": (1,)}
    more: dict[str, Any] = {"prompt": 500, "output_tokens": 50, "machine": "h200", "top": 20}
    answer = library.search(
        "qwen3-30b-a3b", serve="server", jobs=1, verify=0, **given, **more
    ).as_json()
    strategies = [row["decode"]["strategy"] for row in answer["best"]]
    assert "--ep 2 --tp 2" in strategies
    assert "--dp 2 --ep 2" in strategies
    assert "--ep 2 --tp 2 --dp-attention" not in strategies  # has the flags of --dp 2 --ep 2
    assert answer["cut"]["the engine has the flags of another worker for it"] == 1


@pytest.mark.parametrize(
    ("flags", "who", "what"),
    [
        ({"kv_dtype": "int8"}, "vllm sglang trtllm", "caches in int8"),
        ({"pp": 2, "afd": True}, "vllm sglang trtllm", "feed-forward on ranks of their own"),
        ({"part": "x"}, "vllm sglang trtllm", "feed-forward on ranks of their own"),
        ({"lora": "wq", "lora_rank": 513}, "vllm", "adapters of rank 513, but of up to 512"),
        ({"lora": "wq,embed", "lora_rank": 16}, "trtllm", "adapters of embed"),
        ({"two_batch_overlap": True}, "trtllm", "two half batches"),
    ],
)
def test_what_engines_have_no_flags_for(flags: dict[str, Any], who: str, what: str) -> None:
    options = JobOptions("m", **flags)
    for name, engine in ENGINES.items():
        lacks = engine.lacks(layout_of(options, experts=False), options)
        assert (what in lacks) if name in who.split() else not lacks


@pytest.mark.parametrize(
    ("prefill", "decode", "who"),
    [
        (1, 1, "vllm sglang trtllm"),
        (2, 1, "sglang trtllm"),
        (2, 2, "sglang trtllm"),
        (1, 2, "trtllm"),
        (4, 2, "trtllm"),
    ],
)
def test_stages_between_which_engines_send_caches(prefill: int, decode: int, who: str) -> None:
    layouts = [layout_of(JobOptions("m", tp=2, pp=pp), experts=False) for pp in (prefill, decode)]
    assert [n for n, engine in ENGINES.items() if not engine.unsent(*layouts)] == who.split()


def test_pools_of_vllm_have_no_stages() -> None:
    given: dict[str, Any] = {"sizes": {"L": 4}, "ranks": 4, "batch": (4,), "tpot": "1s"}
    more: dict[str, Any] = {"prompt": 500, "output_tokens": 50, "machine": "h200", "top": 50}
    for stack, sends in (("vllm", False), ("trtllm", True)):
        answer = library.search(
            "llama3-8b", serve="server", stack=stack, jobs=1, verify=0, pp="1,2", **given, **more
        ).as_json()
        pools = [row for row in answer["best"] if row["mode"] == "disaggregated"]
        assert any("pp" in row["decode"]["strategy"] for row in answer["best"])
        assert any("pp" in row["decode"]["strategy"] for row in pools) is sends
        what = "vllm sends no caches of these pipeline stages between workers"
        assert (what in answer["cut"]) is not sends


def test_workers_of_several_hosts_say_where_caches_are() -> None:
    pools = [worker(role, two_batch_overlap=True) for role in ("prefill", "decode")]
    scripts = ENGINES["vllm"].files("about", pools)
    for role, kernels in (("prefill", "deepep_high_throughput"), ("decode", "deepep_low_latency")):
        assert "export VLLM_NIXL_SIDE_CHANNEL_HOST=" in scripts[f"{role}.sh"]
        assert f"--all2all-backend {kernels}" in scripts[f"{role}.sh"]
    assert "NIXL" not in ENGINES["vllm"].files("about", [worker("server")])["server.sh"]


def test_scripts_of_trtllm_say_which_weights_it_needs() -> None:
    script = ENGINES["trtllm"].files("about", [worker("server")])["server.sh"]
    assert "# MODEL has weights of fp8" in script


@pytest.mark.parametrize(
    ("flags", "whole"),
    [
        ({"tp": 8, "weight_dtype": "fp8"}, True),  # 12 blocks of 128
        ({"tp": 4, "weight_dtype": "fp8"}, False),
        ({"tp": 8, "weight_dtype": "fp8", "weight_block": 64}, False),
        ({"tp": 8, "weight_dtype": "int8"}, False),
        ({"tp": 8}, False),
    ],
)
def test_sglang_has_shared_experts_whole_where_blocks_do_not_divide(
    flags: dict[str, Any], whole: bool
) -> None:
    options, engine = JobOptions("m", **flags), ENGINES["sglang"]
    assert engine.adapted(options, {"F_shared": 1536}).whole_shared_experts is whole
    assert engine.adapted(options, {"F": 1536}) is options
    assert ENGINES["vllm"].adapted(options, {"F_shared": 1536}) is options
    script = ENGINES["sglang"].files("about", [worker("server", whole_shared_experts=whole)])
    assert ("SGLANG_SHARED_EXPERT_TP1=1" in script["server.sh"]) is whole


def test_servers_of_sglang_with_shared_experts_of_few_blocks() -> None:
    sizes = {"L_dense": 1, "L_sparse": 1, "F_shared": 384}
    given: dict[str, Any] = {"sizes": sizes, "weight_dtype": "fp8"}
    more: dict[str, Any] = {"prompt": 500, "output_tokens": 50, "machine": "h200", "top": 20}
    how: dict[str, Any] = {"ranks": 2, "batch": (1,), "jobs": 1, "verify": 0}
    found = {
        stack: library.search("glm-4.5", serve="server", stack=stack, **given, **more, **how)
        for stack in ("vllm", "sglang")
    }
    words = {
        stack: [row["decode"]["strategy"] for row in answer.as_json()["best"]]
        for stack, answer in found.items()
    }
    assert any("--whole-shared-experts" in text for text in words["sglang"])
    assert not any("--tp 2" in text for text in words["vllm"])


def test_copies_of_experts_and_half_batches_have_flags() -> None:
    wide = worker("decode", dp=8, ep=8, redundant_experts=32, two_batch_overlap=True)
    files = {n: "".join(e.files("about", [wide]).values()) for n, e in ENGINES.items()}
    assert """--enable-eplb \\\n  --eplb-config '{"num_redundant_experts": 32}'""" in files["vllm"]
    assert "--enable-dbo" in files["vllm"]
    assert "--ep-num-redundant-experts 32" in files["sglang"]
    assert "--enable-two-batch-overlap" in files["sglang"]
    assert "load_balancer:\n    num_slots: 288" in files["trtllm"]


def test_split_caches_have_a_flag_of_vllm_alone() -> None:
    split = worker("decode", tp=8, ep=8, dcp=8)
    prefills = worker("prefill", tp=8, ep=8, dcp=8)
    vllm = ENGINES["vllm"]
    assert "--decode-context-parallel-size 8" in "".join(vllm.files("about", [split]).values())
    assert "context-parallel" not in "".join(vllm.files("about", [prefills]).values())
    assert not vllm.lacks(split.layout, split.options)
    assert "cached tokens" in ENGINES["sglang"].lacks(split.layout, split.options)


def test_vllm_files() -> None:
    files = ENGINES["vllm"].files("about", [worker("server", dp=8, ep=8)])
    assert (
        files["server.sh"]
        == """#!/bin/sh
# about
: "${MODEL:?set MODEL to the weights: a folder or a repository}"
vllm serve "$MODEL" \\
  --port 8000 \\
  --tensor-parallel-size 1 \\
  --data-parallel-size 8 \\
  --enable-expert-parallel \\
  --max-num-seqs 64 \\
  --max-num-batched-tokens 8192 \\
  --max-model-len 4500 \\
  --dtype bfloat16 \\
  --quantization fp8 \\
  --kv-cache-dtype fp8 \\
  --gpu-memory-utilization 0.9
"""
    )
    assert "--worker-urls http://server-0:8000 http://server-1:8000" in files["router.sh"]
    pods = ENGINES["vllm"].files("about", [worker("prefill", tp=4), worker("decode", tp=8)])
    assert sorted(pods) == ["decode.sh", "prefill.sh", "router.sh"]
    assert '"kv_connector": "NixlConnector"' in pods["prefill.sh"]
    assert "--decode http://decode-1:8000" in pods["router.sh"]


def test_sglang_files() -> None:
    files = ENGINES["sglang"].files(
        "about", [worker("prefill", tp=4), worker("decode", dp=2, ep=2, tp=4)]
    )
    assert "--disaggregation-mode prefill" in files["prefill.sh"]
    decode = files["decode.sh"]
    for words in ("--tp-size 8", "--dp-size 2", "--enable-dp-attention", "--ep-size 2"):
        assert words in decode
    assert "--max-running-requests 128" in decode  # of both groups
    assert "--chunked-prefill-size 16384" in decode
    assert "--prefill http://prefill-0:8000 8998" in files["router.sh"]
    alone = ENGINES["sglang"].files("about", [worker("server", tp=4)])["server.sh"]
    assert "--enable-mixed-chunk" in alone
    assert "--mem-fraction-static 0.9" in alone
    assert "disaggregation" not in alone
    turns = replace(worker("server", tp=4), scheduler=SchedulerRule(prompts="alone"))
    assert "--enable-mixed-chunk" not in ENGINES["sglang"].files("about", [turns])["server.sh"]


def test_trtllm_files() -> None:
    import yaml

    files = ENGINES["trtllm"].files(
        "about", [worker("prefill", tp=4), worker("decode", dp=8, ep=8)]
    )
    prefill, decode, joined = (
        yaml.safe_load(files[name])
        for name in ("prefill.yaml", "decode.yaml", "disaggregated.yaml")
    )
    assert prefill["tensor_parallel_size"] == 4
    assert prefill["disable_overlap_scheduler"]
    assert decode["tensor_parallel_size"] == decode["moe_expert_parallel_size"] == 8
    assert decode["enable_attention_dp"]
    assert not prefill["enable_attention_dp"]
    assert decode["kv_cache_config"]["dtype"] == "fp8"
    assert joined["context_servers"] == {
        "num_instances": 2,
        "urls": ["prefill-0:8000", "prefill-1:8000"],
    }
    assert "--config decode.yaml" in files["decode.sh"]


@pytest.mark.parametrize(
    ("flags", "engine", "words"),
    [
        ({"tp": 16}, "vllm", '--nnodes 2|--node-rank "$NODE_RANK"|"$LEADER" $HEADLESS'),
        ({"dp": 16, "ep": 16}, "vllm", "--data-parallel-size-local 8|$((NODE_RANK * 8))"),
        ({"dp": 12, "ep": 12, "tp": 2}, "vllm", "--data-parallel-size-local 4"),
        ({"dp": 10, "ep": 10, "tp": 2}, "vllm", "# a worker has 3 hosts"),
        ({"tp": 8, "pp": 2}, "sglang", '--nnodes 2|--node-rank "$NODE_RANK"|"$LEADER:5000"'),
        ({"dp": 16, "ep": 16}, "trtllm", "srun|--nodes 2|--ntasks 16|--ntasks-per-node 8"),
    ],
)
def test_workers_on_several_hosts(flags: dict[str, Any], engine: str, words: str) -> None:
    """Of hosts with eight devices; a worker on one needs nothing."""
    several, one = (replace(worker("server", **f), devices=8) for f in (flags, {"tp": 8}))
    script = ENGINES[engine].files("about", [several])["server.sh"]
    assert all(text in script for text in words.split("|"))
    alone = "".join(ENGINES[engine].files("about", [one]).values())
    assert not any(text in alone for text in ("NODE_RANK", "srun", "nnodes"))


@pytest.mark.parametrize(("tp", "whole"), [(1, True), (2, False)])
def test_groups_of_sglang_have_the_head_and_dense_layers_that_were_timed(
    tp: int, whole: bool
) -> None:
    engine = ENGINES["sglang"]
    groups, alone = (
        "".join(engine.files("about", [each]).values())
        for each in (worker("decode", dp=4, ep=4, tp=tp), worker("decode", tp=4))
    )
    assert "--enable-dp-lm-head" in groups
    assert ("--moe-dense-tp-size 1" in groups) is whole
    assert "lm-head" not in alone


def test_sglang_has_no_prompts_beside_decode_on_stages() -> None:
    beside = JobOptions("m", pp=2, prompt_steps="beside")
    layout = layout_of(beside, experts=False)
    assert "prompts beside decode" in ENGINES["sglang"].lacks(layout, beside)
    assert not ENGINES["vllm"].lacks(layout, beside)


# -- the command -----------------------------------------------------------------------------------

ASKED = [*WORDS, "--prompt", "500", "--output-tokens", "50", "--ranks", "1", "--batch", "4"]


def test_launch_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = stagec(*ASKED, "--machine", "h100-sxm", "--emit-run", f"vllm={folder}", "--json")
    data = json.loads(done.out)
    assert data["best"][0]["mode"] == "aggregated"
    assert data["best"][0]["prefill"] is None
    assert data["launch"]["files"]["server.sh"] == (folder / "server.sh").read_text()
    assert "--max-num-seqs 5" in data["launch"]["files"]["server.sh"]  # four, and a prompt


def test_launched_servers_have_what_was_searched() -> None:
    """The tokens of a step, and the cached tokens before a prompt."""
    more = ["--context", "300", "--step-tokens", "256", "--emit-run", "vllm", "--json"]
    data = json.loads(stagec(*ASKED, "--machine", "h100-sxm", *more).out)
    script = data["launch"]["files"]["server.sh"]
    assert "--max-model-len 850" in script
    assert "--max-num-batched-tokens 256" in script
    assert data["best"][0]["decode"]["max_tokens"] == 256


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm", ["--enable-lora", "--max-loras 4", "--max-lora-rank 8"]),
        ("sglang", ["--enable-lora", "--max-loras-per-batch 4", "--max-lora-rank 8"]),
        ("trtllm", ["max_loras: 4", "max_lora_rank: 8", '["attn_q", "mlp_h_to_4h", "mlp_gate"]']),
    ],
)
def test_launch_files_have_adapters(engine: str, flags: list[str]) -> None:
    lora = ["--lora", "wq,w_gate_up", "--lora-rank", "8", "--max-loras", "4"]
    done = stagec(*ASKED, "--machine", "h100-sxm", *lora, "--emit-run", engine)
    assert all(flag in done.out for flag in flags)


def test_launch_files_of_vllm_have_a_rank_that_it_takes() -> None:
    engine = ENGINES["vllm"]
    for rank, started in ((12, 16), (16, 16), (257, 320)):
        files = engine.files("about", [worker("server", lora="wq", lora_rank=rank)])
        assert f"--max-lora-rank {started}" in files["server.sh"]
    text = (Path(library.__file__).parent / "models/stacks/vllm.stg").read_text(encoding="utf-8")
    assert f"adapter_ranks = {VLLM_RANKS}]" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no machine is given"),
        (("--machine", "h100-sxm", "--tpot", "1us"), "no server meets the limits"),
        (
            ("--machine", "h100-sxm", "--objective", "time"),
            "--objective time is an objective of one step",
        ),
        (
            ("--machine", "h100-sxm", "--step", "decode=1x1"),
            "--step cannot be used with --serve server",
        ),
        (
            ("--machine", "h100-sxm", "--no-levers"),
            "--no-levers cannot be used with --serve server",
        ),
        (("--machine", "h100-sxm", "--emit-run", "tgi"), "'tgi' is not one of vllm"),
        (
            ("--machine", "h100-sxm", "--emit-run", "vllm", "--speculative", "2"),
            "--emit-run does not support drafts",
        ),
        (("--machine", "h100-sxm", "--lora", "nothing"), "no worker of the space can be compiled"),
        (("--machine", "h100-sxm", "--accepted", "2"), "needs drafts, which this step"),
        (("--machine", "h100-sxm", "--part", "encoder=e: dp=1"), "have no encoder"),
        (("--machine", "h100-sxm", "--emit-run", "vllm="), "expects a folder"),
        (("--machine", "h100-sxm", "--price", "1,2"), "--price gives 2 prices"),
        (("--machine", "h100-sxm", "--stack", "vlm"), "no stack 'vlm'"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    done = stagec(*ASKED, *words)
    assert done.code in (1, 2)
    assert message in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("--objective", "goodput"),
        ("--emit-run", "vllm"),
        ("--accepted", "2"),
        ("--verify", "2"),
        ("--measured", "table.csv"),
        ("--kernels-from", "aiconfigurator"),
    ],
)
def test_options_of_servers_need_one(words: tuple[str, ...]) -> None:
    done = stagec(*("search", "llama3-8b", "--ranks", "1", "--machine", "h100-sxm"), *words)
    assert done.code == 1
    assert "add --serve server" in done.err
