"""`stagec serve` of requests over time: what is read, what is asked for, what seconds are between
exact ones."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagec as library
from stagec.answers.requests.backlog import backlog_text
from stagec.jobs.request.options import job_options
from stagec.jobs.session import Session
from stagec.jobs.step_modules import StepModules
from stagec.jobs.step_surface import ExactSteps, SharedSteps, StepSurface, grid
from stagec.serving.arrivals import Conversations, renewal
from stagec.serving.requests import Request, read_requests, turns
from stagec.serving.served import ServedRequest
from stagec.serving.step import Step, mean_chunk, parse_step
from stagec.serving.step_times import SECOND
from tests.support import Outcome, assert_schema, stagec

SIZES = ("--set", "L=2,D=256,F=512,V=1024,H=8,G=4,K=32")
H100 = ("--machine", "h100-sxm")
SERVER = ("llama3-8b", *SIZES, *H100)
#: Of a draft model, with a quarter of the caches.
SMALL = "L=1,D=64,F=64,V=1024,H=4,G=2,K=32"
#: Bytes of its weights in bf16: two embeddings, and of two layers q, k, v and o, three products of
#: the feed-forward, and norms.
WEIGHTS = 2 * (2 * 1024 * 256 + 2 * (256 * 32 * (8 + 8 + 4 + 4) + 3 * 256 * 512 + 2 * 256) + 256)
LENGTHS = ("--lengths", "prompt=20..200,output=~30")
LOOP = ("--lengths", "prompt=4000,output=8")


def run(*words: str) -> Outcome:
    return stagec("serve", *SERVER, *words)


def answer(*words: str) -> dict[str, Any]:
    ran = run(*words, "--json")
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


# -- files -----------------------------------------------------------------------------------------

FORMS = {
    "azure.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:16:01.0000001,396,109\n"
    ),
    "splitwise.csv": (
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
        "0,2,0,0.0,1,374,44\n1,2,0,14.3194101,1,396,109\n"
    ),
    "mooncake.jsonl": (
        '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
        '{"timestamp": 14319.4101, "input_length": 396, "output_length": 109, "hash_ids": [0, 1]}\n'
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_traces(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FORMS[name], encoding="utf-8")
    actual = read_requests(path)
    assert [(r.arrival, r.prompt, r.output) for r in actual] == [
        (0, 374, 44),
        (14_319_410_100, 396, 109),
    ]
    assert [tuple(r.prefix) for r in actual] == ([(0,), (0, 1)] if "mooncake" in name else [(), ()])


WRONG = {
    "a day that is none": (
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:15:46.1,374,44\n",
        "a.csv:2:1: error: the arrival (TIMESTAMP) is '2023-13-16 18:15:46.1': month must be",
    ),
    "blocks that are none": (
        "a.jsonl",
        '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": ["x"]}\n',
        "a.jsonl:1:1: error: the blocks of the prompt (hash_ids) are",
    ),
    "an adapter that is no name": (
        "a.jsonl",
        '{"timestamp": 0, "input_length": 4, "output_length": 1, "adapter": ["x"]}\n',
        "a.jsonl:1:1: error: the adapter is ['x'], expected a name of at most 256 characters",
    ),
    "a name of half a character": (
        "a.jsonl",
        '{"timestamp": 0, "input_length": 4, "output_length": 1, "adapter": "\\ud800"}\n',
        "a.jsonl:1:1: error: a request uses the adapter",
    ),
    "no column of tokens": (
        "a.csv",
        "TIMESTAMP,GeneratedTokens\n2023-11-16 18:15:46,44\n",
        "a.csv:2:1: error: the request does not say the tokens of its prompt",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_are_wrong(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    ran = run("--requests", name)
    assert ran.code == 1
    assert message in ran.err


REFUSED: dict[tuple[str, ...], str] = {
    (
        "--rate",
        "1",
        "--concurrency",
        "2",
        *LENGTHS,
    ): "--rate and --concurrency cannot be used together",
    ("--replicas", "2", "--prompt", "64"): "--replicas needs requests over time",
    ("--rate", "1"): "the number of tokens of a prompt is missing",
    ("--rate", "1", "--lengths", "prompt=long"): "--lengths: prompt is 'long', expected a number",
    ("--rate", "1", "--turns", "0", *LENGTHS): "--turns is '0', expected a number of 1 to",
    ("--rate", "1", "--lengths", "prompts=3"): "expects prompt=... or output=...",
    ("--rate", "1", "--lengths", "prompt=lognormal:0:1"): "expected lognormal:MEAN:DEVIATION",
    ("--rate", "1", "--batches", "1", *LENGTHS): "--batches cannot be used with requests over time",
    ("--rate", "1", "--batch", "1", *LENGTHS): "--batch cannot be used with requests over time",
    ("--rate", "1", "--chunk", "8", *LENGTHS): "--chunk cannot be used with requests over time",
    ("--rate", "1", "--part", "encoder=e", *LENGTHS): "but for feed-forward",
    ("--rate", "1", "--draft", "llama3-8b", *LENGTHS): "--draft needs --speculative",
    ("--rate", "1", "--accepted", "2", *LENGTHS): "needs drafts, which this step",
    ("--rate", "1", "--serve", "decode", "--context", "8", *LENGTHS): "--serve decode is one step",
    (
        "--rate",
        "1",
        "--max-batch",
        "9",
        "--max-tokens",
        "8",
        *LENGTHS,
    ): "raise --max-tokens to 9 or more",
    ("--rate", "1", "--prefill-replicas", "2", *LENGTHS): "needs --serve disaggregated",
    ("--rate", "1", "--until", "0.5", *LENGTHS): "--until needs a rollout",
    ("--rate", "1", "--iterations", "2", *LENGTHS): "--iterations needs rollouts",
    ("--rate", "1", "--train-ranks", "2", *LENGTHS): "--train-ranks needs batches",
    ("--batch-of", "4", "--ahead", "1", *LENGTHS): "--ahead needs batches that follow each other",
    ("--batch-of", "9999", "--iterations", "999", *LENGTHS): "at most 1,000,000 are supported",
    ("--concurrency", "1", "--burst", "2", *LENGTHS): "--burst needs arrivals at random",
    ("--rate", "1", "--pause", "1s", *LENGTHS): "--pause needs the turns of a conversation",
    ("--rate", "1", "--fail", "3@1s+1s", *LENGTHS): "there is no replica 3 of 1 replicas",
    ("--rate", "1", "--repair", "1s", *LENGTHS): "--repair needs failures at random",
    ("--rate", "1", "--scale-delay", "1s", *LENGTHS): "--scale-delay needs --autoscale",
    (
        "--rate",
        "1",
        "--autoscale",
        "1..2",
        "--replicas",
        "3",
        *LENGTHS,
    ): "allows at most 2 replicas",
    ("--rate", "1", "--autoscale", "prefill:1..2", *LENGTHS): "needs --serve disaggregated",
    ("--rate", "1", "--autoscale", "1..2", "--autoscale", "1..3", *LENGTHS): "is given twice",
    (
        "--rate",
        "1",
        "--autoscale",
        "1..2",
        "--dp",
        "2",
        *LENGTHS,
    ): "cannot be used with --dp, here 2",
    ("--rate", "1", "--mtbf", "1us", "--start-time", "1us", *LENGTHS): "give a longer --mtbf",
    ("--rate", "1", "--host-cache", "4GiB", *LENGTHS): "--host-cache keeps the beginnings",
    ("--rate", "1", "--disk-cache", "4GiB", *LENGTHS): "needs the speed of the disk",
    ("--rate", "1", "--disk-bandwidth", "6.8", *LENGTHS): "--disk-bandwidth needs a disk",
    ("--host-cache", "4GiB", "--prompt", "64"): "--host-cache needs requests over time",
    ("--context-from", "host", "--prompt", "64"): "--context-from host needs --context",
    (
        *("--context-from", "disk", "--context", "64", "--prompt", "64"),
    ): "the speed of the disk is missing",
    ("--rate", "1", "--context-from", "host", *LENGTHS): "cannot be used with requests over time",
    ("--rate", "1", "--cache-blocks", "3", *LENGTHS): "but the cache of a replica has 3",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_is_an_error_with_a_remedy(words: tuple[str, ...]) -> None:
    ran = run(*words)
    assert ran.code == 1, ran.out
    assert REFUSED[words] in ran.err
    assert "help:" in ran.err


# -- what is drawn ---------------------------------------------------------------------------------


def test_lengths_have_their_means() -> None:
    text = "prompt=lognormal:500:0.8,output=~100"
    actual = renewal(1.0, 1.0, 20_000, text, 1, None, 1)
    assert sum(r.prompt for r in actual) / len(actual) == pytest.approx(500, rel=0.05)
    assert sum(r.output for r in actual) / len(actual) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_a_gamma_distribution(shape: float) -> None:
    actual = renewal(10.0, shape, 20_000, "", 1, 8, 8)
    gaps = [(b.arrival - a.arrival) / 1e9 for a, b in itertools.pairwise(actual)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert variance / mean**2 == pytest.approx(1 / shape, rel=0.1)


def test_a_turn_has_all_before_it() -> None:
    first = renewal(1.0, 1.0, 1, "", 0, 100, 30, Conversations("3", 5, 16))
    each = list(turns(first))
    assert [(r.prompt, r.output) for r in each] == [(100, 30), (230, 30), (360, 30)]
    assert [len(r.prefix) for r in each] == [130 // 16, 260 // 16, 390 // 16]
    assert all(b.prefix[: len(a.prefix)] == a.prefix for a, b in itertools.pairwise(each))


# -- seconds of steps ------------------------------------------------------------------------------


def test_a_grid_has_points_in_each_doubling() -> None:
    assert grid(2)[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert grid(4, 16)[:6] == [16, 20, 24, 28, 32, 40]


def known(step: Step) -> int:
    """A law that is linear in all that steps are made of, which interpolation finds exactly."""
    actual = 10**6
    for c in step.classes:
        actual += c.count * (1000 + 50 * c.new + (7 * c.cached if c.new == 1 else 0))
    return actual * 10**6


def test_between_exact_steps_a_linear_law_is_exact() -> None:
    surface, exact = StepSurface(known), ExactSteps(known)
    for count, total in ((1, 1), (3, 99), (5, 5 * 777), (100, 100 * 4321), (129, 129 * 17)):
        assert surface.decode(count, total).time(total) == exact.decode(count, total).time(total)
    for count, total, chunks in ((0, 0, [(37, 0)]), (9, 900, [(50, 0), (50, 0)])):
        assert surface.mixed(count, total, chunks) == exact.mixed(count, total, chunks)
    check = surface.check()
    assert check.steps == 7
    assert check.largest < 1e-9


def test_groups_wait_for_the_one_with_the_longest_prompts() -> None:
    surface, exact = StepSurface(known, groups=4), ExactSteps(known, groups=4)
    for chunks in ([(900, 0), (30, 0), (1, 0)], [(n, 0) for n in range(64, 128)]):
        assert surface.mixed(8, 800, chunks) == exact.mixed(8, 800, chunks), chunks
    assert exact.mixed(0, 0, [(900, 0), (30, 0)]) == exact.mixed(0, 0, [(900, 0)])


def _tokens(each: int, start: int = 0) -> ExactSteps:
    """Steps that take `each` for each token of a group, of which there are 4, after a start."""
    return ExactSteps(lambda step: start + each * step.tokens, groups=4)


def test_feed_forward_takes_the_tokens_of_all_groups_and_attention_those_of_one() -> None:
    """A prompt of one group keeps its attention busy, and feed-forward with a quarter of the tokens
    that equal prompts of all groups have."""
    for of_attention, of_apart in ((10, 1), (10, 30), (10, 1000)):
        whole = _tokens(max(of_attention, of_apart), 7)
        apart = replace(_tokens(of_apart), groups=1)
        costs = SharedSteps(whole, apart, _tokens(of_attention))
        for chunks in ([(900, 0)], [(900, 0), (300, 0)], [(900, 0)] * 4, [(900, 0)] * 9):
            most = 900 * -(-len(chunks) // 4)
            mean = sum(new for new, _ in chunks) / 4
            expected = 7 + max(of_attention * most, of_apart * mean)
            assert costs.mixed(0, 0, chunks) == pytest.approx(expected), chunks
        assert costs.decode(8, 80) == whole.decode(8, 80)


@pytest.mark.parametrize("chunks", [[(900, 7)], [(900, 0), (300, 0)], [(90, 0)] * 4, [(9, 0)] * 9])
def test_experts_take_the_tokens_of_all_groups_one_after_the_other(
    chunks: list[tuple[int, int]],
) -> None:
    """In one pod a step takes what attention of the fullest group and experts of all take; what
    waits for hosts is no shorter than in a step of equal groups."""
    shared = replace(_tokens(30), groups=1)
    decoding, most = 8 // 4, sum(new for new, _ in chunks[::4])
    mean = sum(new for new, _ in chunks) / 4
    costs = SharedSteps(_tokens(10 + 30, 7), shared)
    expected = 7 + 10 * (decoding + most) + 30 * (decoding + mean)
    assert costs.mixed(8, 80, chunks) == pytest.approx(expected, abs=30 * len(chunks))
    hosts = ExactSteps(lambda step: max(10**6, 40 * step.tokens), groups=4)
    assert SharedSteps(hosts, shared).mixed(8, 80, chunks) == 10**6


def test_prompts_of_few_groups_cost_experts_their_own_tokens() -> None:
    """Experts over four ranks with sequences of their own compute a prompt of one of them once, not
    four times; without experts nothing is shared."""
    experts = ("mixtral-8x7b", *H100, "--dp", "4", "--ep", "4", "--json")
    alone, all_four = (
        json.loads(stagec("serve", *experts, *LOOP, "--concurrency", n, "--count", n).out)
        for n in "14"
    )
    step = json.loads(
        stagec("time", *experts, "--serve", "mixed", "--step", "prefill=1x4000+0").out
    )
    assert all_four["times"]["ttft"]["p50"] == pytest.approx(step["step_seconds"], rel=0.02)
    assert alone["times"]["ttft"]["p50"] < 0.5 * all_four["times"]["ttft"]["p50"]


def test_two_pods_may_decode_with_feed_forward_apart() -> None:
    """Prompts have other ranks, so steps decode, and the loop is that of batches."""
    pods = ("--serve", "disaggregated", "--prefill", "", "--decode", "dp=2", "--prefill-replicas")
    part = ("2", "--part", "x=feed-forward: tp=2", "--prompt", "100", "--output-tokens", "400")
    (row,) = answer(*pods, *part, "--batches", "16")["points"]
    loop = answer(*pods, *part, "--concurrency", "16", "--count", "64")
    assert loop["ranks"] == 2 + 4
    assert loop["times"]["tpot"]["p50"] == pytest.approx(row["tpot"], rel=0.02)
    whole = answer(*pods, "2", *part[3:], "--batches", "16")["points"]
    assert row["ttft"] == whole[0]["ttft"]  # the pod that prefills is the same
    refused = stagec("time", *SERVER, *pods[:-1], *part[1:5])
    assert "'stagec serve' has both pods" in refused.err


@pytest.mark.parametrize(
    ("flags", "copies", "senders"),
    [
        (("--replicas", "16"), 16, 4),
        (("--replicas", "16", "--tp", "2"), 16, 4),
        (("--dp", "2"), 2, 1),
        (("--pp", "2", "--replicas", "4"), 4, 1),
        (("--replicas", "2"), 1, 1000),  # what a rank receives takes longer
    ],
)
def test_trainers_send_the_weights_of_all_ranks(
    flags: tuple[str, ...], copies: int, senders: int
) -> None:
    """Weights of two layers and both embeddings in bf16, at 50 GB/s of each rank that sends."""
    whole = 2 * (2 * (218_112_000 - 8192 + 8192 * 2) + 2 * 128_256 * 4096 + 4096)
    load = ("--batch-of", "8", "--iterations", "2", "--lengths", "prompt=64,output=4")
    model = ("llama3-8b", "--set", "L=2", "--machine", "h100-sxm")
    ran = stagec("serve", *model, *load, *flags, "--train-ranks", str(senders), "--json")
    assert ran.code == 0, ran.err
    rollouts = json.loads(ran.out)["rollouts"]
    sent = max(copies / senders, 1) * whole
    assert rollouts["update"] == pytest.approx(sent / 50e9, rel=0.001)


@pytest.mark.parametrize("seed", range(3))
def test_equal_prompts_keep_the_sums_of_unequal_ones(seed: int) -> None:
    """Tokens and pairs exactly; cached rows nearly, also where a short prompt has all of them; and
    prompts that are equal stay as they are."""
    source = random.Random(seed)
    for _ in range(300):
        several = source.randint(1, 7)
        chunks = [(source.randint(1, 4000), source.choice([0, 9000])) for _ in range(several)]
        number, size, past = mean_chunk(chunks)
        assert number * size == pytest.approx(sum(new for new, _ in chunks))
        pairs = sum(new * cached + new * (new + 1) / 2 for new, cached in chunks)
        assert number * size * (past + (size + 1) / 2) == pytest.approx(pairs)
        assert mean_chunk([chunks[0]] * several) == pytest.approx((several, *chunks[0]))
    number, _, past = mean_chunk([(32, 20000), (2000, 0)])
    assert number * past == pytest.approx(20000, rel=0.05)


def test_prompts_of_unequal_sizes_have_one_kernel() -> None:
    """As many launches as prompts that are alike, for as many tokens and pairs."""
    step = parse_step("decode=3x100,decode=1x201,chunk=1x20+0,prefill=2x50+0,prefill=1x96+8")
    one = step.together()
    assert str(one) == "decode=4x126,prefill=3x72+1"
    assert (one.tokens, one.sampled) == (step.tokens, step.sampled)
    assert one.pairs == pytest.approx(step.pairs, rel=0.01)
    modules = StepModules(job_options("llama3-8b", None, {"sizes": {"L": 2}}), Session())
    machine = library.machine("h100-sxm")

    def exact(step: Step) -> int:
        return round(modules.compiled(step).time(machine).step_seconds * SECOND)

    chunks = [(size, 0) for size in (32, 48, 80, 96)]
    several, equal = (ExactSteps(exact).mixed(8, 800, c) for c in (chunks, [(64, 0)] * 4))
    assert equal < several < 1.03 * equal


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "flags"), [("llama3-8b", {"tp": 2}), ("mixtral-8x7b", {"tp": 4})]
)
def test_interpolated_seconds_are_near_exact_ones(model: str, flags: dict[str, Any]) -> None:
    machine = library.machine("h100-sxm")
    modules = StepModules(job_options(model, None, flags), Session())

    def exact(step: Step) -> int:
        return round(modules.compiled(step).time(machine).step_seconds * SECOND)

    surface, single = StepSurface(exact), ExactSteps(exact)
    errors: list[float] = []
    for count, context in ((5, 700), (27, 1234), (90, 3000), (200, 5000)):
        total = count * context
        actual, expected = (s.decode(count, total).time(total) for s in (surface, single))
        errors.append(abs(actual / expected - 1))
        for chunks in ([(777, 0)], [(1500, 3000)], [(300, 0), (1100, 0)]):
            pair = (s.mixed(count, total, chunks) for s in (surface, single))
            actual, expected = pair
            errors.append(abs(actual / expected - 1))
    errors.sort()
    assert errors[len(errors) // 2] < 0.015
    assert errors[-1] < 0.06


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.long
def test_an_encoder_runs_in_the_step_that_begins_a_request() -> None:
    """Alone, one request takes a step of prefill, and then steps of decode."""
    job = library.job("t5-base", sizes={"S": 128})
    how: dict[str, Any] = {"concurrency": 1, "count": 1, "step_grid": "exact"}
    lengths: dict[str, Any] = {"lengths": "prompt=3,output=4", "cache_blocks": 100}
    actual = job.serve_requests("h100-sxm", **how, **lengths)
    prompt = library.job("t5-base", sizes={"S": 128}, serve="prefill", batch=1, prompt=3)
    expected = prompt.time("h100-sxm").as_json()["step_seconds"]
    assert actual.spreads["ttft"].values[0] == pytest.approx(expected, rel=1e-9)
    assert actual.spreads["tpot"].values[0] < expected


def test_exact_steps_and_a_grid_agree() -> None:
    """Means of so many requests: of forty, one that just misses a step moves them by a tenth."""
    words = ("--rate", "400", "--count", "200", *LENGTHS)
    actual, exact = answer(*words), answer(*words, "--step-grid", "exact")
    assert exact["steps"]["grid"] is None
    assert exact["steps"]["evaluated"] > actual["steps"]["checked"] > 0
    for name in ("ttft", "tpot", "latency"):
        assert actual["times"][name]["mean"] == pytest.approx(
            exact["times"][name]["mean"], rel=0.05
        )


def test_a_server_that_is_alone_takes_its_steps() -> None:
    """One request at a time: prefill and decode, as the steps are exact."""
    actual = answer("--concurrency", "1", "--count", "3", "--prompt", "100", "--output-tokens", "5")
    machine = library.machine("h100-sxm")
    sizes = {"L": 2, "D": 256, "F": 512, "V": 1024, "H": 8, "G": 4, "K": 32}
    modules = StepModules(job_options("llama3-8b", None, {"sizes": sizes}), Session())

    def seconds(text: str) -> float:
        return modules.compiled(parse_step(text)).time(machine).step_seconds

    assert actual["times"]["ttft"]["p50"] == pytest.approx(seconds("prefill=1x100+0"), rel=0.02)
    assert actual["times"]["tpot"]["p50"] == pytest.approx(seconds("decode=1x102"), rel=0.02)
    assert actual["pools"]["server"]["steps"] == 15
    assert actual["pools"]["server"]["busy"] == pytest.approx(1)


@pytest.mark.long
@pytest.mark.parametrize(
    "pods", [(), ("--serve", "disaggregated", "--prefill", "", "--decode", "")]
)
def test_steps_that_decode_may_verify_drafts(pods: tuple[str, ...]) -> None:
    """A token takes its share of a step that verifies drafts: that of 'stagec time', between its
    first context and its last one. The first token is that of a server without drafts."""
    load = ("--concurrency", "4", "--count", "4", "--lengths", "prompt=64,output=33", *pods)
    drafts = ("--speculative", "3", "--accepted", "2.5")
    actual, plain = answer(*load, *drafts)["times"], answer(*load)["times"]
    assert actual["ttft"] == plain["ttft"]
    words = (*SERVER, "--serve", "decode", "--batch", "4", *drafts, "--json", "--no-levers")
    first, last = (
        json.loads(stagec("time", *words, "--context", context).out)["serving"]["tpot_seconds"]
        for context in ("64", "96")
    )
    if not pods:  # all four decode together
        assert first <= actual["tpot"]["mean"] <= last
    assert actual["tpot"]["mean"] < plain["tpot"]["mean"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["tp=1", "on=model"])
def test_a_draft_model_has_its_own_ranks_or_takes_turns(ranks: str) -> None:
    """A step that decodes is that of 'stagec time' with its draft model. Prompts go through both
    models: beside each other on ranks of their own, else one after the other; on the same ranks
    caches of both take memory, else those of the draft model have room of their own."""
    load = ("--concurrency", "4", "--count", "4", "--lengths", "prompt=64,output=33")
    drafts = ("--speculative", "3", "--accepted", "2.5", "--draft", f"llama3-8b[{SMALL}]: {ranks}")
    actual, main = answer(*load, *drafts), answer(*load)
    small = json.loads(stagec("serve", "llama3-8b", "--set", SMALL, *H100, *load, "--json").out)
    words = (*SERVER, "--serve", "decode", "--batch", "4", *drafts, "--json", "--no-levers")
    first, last = (
        json.loads(stagec("time", *words, "--context", context).out)["serving"]["tpot_seconds"]
        for context in ("64", "96")
    )
    assert first <= actual["times"]["tpot"]["mean"] <= last
    each = [answer["times"]["ttft"]["mean"] for answer in (main, small)]
    turns = ranks == "on=model"
    assert actual["times"]["ttft"]["mean"] == pytest.approx(sum(each) if turns else max(each))
    assert actual["ranks"] == (1 if turns else 2)
    blocks = [answer["pools"]["server"]["blocks"] for answer in (actual, main, small)]
    if turns:  # of the bytes of a block the draft model has a fifth
        assert blocks[0] == pytest.approx(blocks[1] * 4 / 5, rel=1e-3)
    else:
        assert blocks[0] == blocks[1] < blocks[2]


def test_a_prompt_has_the_tokens_of_one_group_of_ranks() -> None:
    """Two groups: three chunks of a prompt, beside which the other group has one of its own."""
    ranks = ("--tp", "2", "--dp-attention", "--max-tokens", "64", "--max-batch", "4")
    lengths = ("--lengths", "prompt=160,output=1")
    for number in ("1", "2"):
        actual = answer(*ranks, "--batch-of", number, *lengths)
        assert actual["pools"]["server"]["steps"] == 3


@pytest.mark.long
def test_a_draft_model_serves_all_groups_of_its_model() -> None:
    """Two groups of ranks, whose sequences are those of one group of the draft model."""
    draft = ("--speculative", "3", "--draft", f"llama3-8b[{SMALL}]: tp=1")
    actual = answer("--dp", "2", *draft, "--concurrency", "4", "--count", "4", *LENGTHS)
    assert (actual["ranks"], actual["pools"]["server"]["replicas"]) == (3, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--concurrency", "2", "--prompt", "20", "--output-tokens", "4"), True),
        (("--concurrency", "2", *LENGTHS), False),
        (("--concurrency", "1", "--prompt", "20", "--output-tokens", "4"), False),
        (("--rate", "5", "--prompt", "20", "--output-tokens", "4"), False),
    ],
)
def test_closed_loops_of_one_length_are_remarked(words: tuple[str, ...], said: bool) -> None:
    assert ("remark: all requests have one length" in run("--count", "4", *words).err) == said


@pytest.mark.parametrize("pods", [(), ("--serve", "disaggregated", "--prompt", "64")])
def test_hosts_take_their_time_before_the_first_token(pods: tuple[str, ...]) -> None:
    words = "--rate", "0.5", "--count", "5", "--lengths", "prompt=64,output=4", *pods
    plain, kept = (answer(*words, "--host-request", f"{ms} ms")["times"] for ms in (0, 10))
    for name, more in (("ttft", 0.01), ("latency", 0.01), ("tpot", 0.0)):
        assert kept[name]["mean"] == pytest.approx(plain[name]["mean"] + more, abs=1e-9)


@pytest.mark.long
def test_goodput_is_within_the_limits() -> None:
    words = ("--rate", "2000", "--count", "60", *LENGTHS)
    every = answer(*words, "--ttft", "10s", "--tpot", "1s")["goodput"]
    none = answer(*words, "--ttft", "1us")["goodput"]
    assert every["share"] == 1
    assert none["share"] == 0
    assert answer(*words)["goodput"] is None


@pytest.mark.long
def test_data_parallel_ranks_are_replicas_and_expert_parallel_ones_are_not() -> None:
    words = ("--rate", "50", "--count", "20", *LENGTHS)
    dense = answer(*words, "--dp", "4")["pools"]["server"]
    assert (dense["replicas"], dense["ranks"]) == (4, 1)
    experts = stagec(
        *("serve", "mixtral-8x7b", "--set", "L=1,D=128,H=2,G=2,M=128,V=256"),
        *("--dp", "2", "--ep", "2"),
        *("--machine", "h100-sxm", *words, "--json"),
    )
    actual = json.loads(experts.out)["pools"]["server"]
    assert (actual["replicas"], actual["ranks"], actual["max_batch"]) == (1, 2, 512)


@pytest.mark.long
def test_rollouts_end_with_their_longest_answer() -> None:
    words = ("--batch-of", "40", *LENGTHS)
    whole, part = answer(*words), answer(*words, "--until", "0.5")
    assert whole["served"] == 40
    assert (part["served"], part["kept_tokens"] > 0) == (20, True)
    assert part["seconds"] == pytest.approx(whole["ends"]["p50"], rel=0.01)
    assert "Half of them are done after" in run(*words).out


def test_rollouts_in_a_row() -> None:
    words = ("--batch-of", "16", "--until", "0.75", "--iterations", "3", *LENGTHS)
    actual = answer(*words, "--train-time", "1s", "--ahead", "1")
    assert_schema("requests", actual)
    rollouts = actual["rollouts"]
    assert (actual["requests"], rollouts["count"], rollouts["quota"]) == (16 + 2 * 12, 16, 12)
    assert [b["carried"] for b in rollouts["batches"]] == [0, 4, 4]
    assert rollouts["batches"][1]["waits"] == pytest.approx(1 + rollouts["update"], rel=0.1)
    # weights of a rank over the network between nodes, 50 GB/s
    assert rollouts["update"] == pytest.approx(WEIGHTS / 50e9)
    assert rollouts["seconds_per_iteration"] == pytest.approx(1, rel=0.1)
    ran = run(*words, "--update-time", "2ms")
    assert "3 rollouts of 16 requests, 40 in all" in ran.out
    assert "servers get weights in 2.00 ms" in ran.out


@pytest.mark.long
def test_same_seed_same_answer() -> None:
    words = ("--rate", "500", "--count", "30", "--burst", "0.5", *LENGTHS)
    assert run(*words, "--json").out == run(*words, "--json").out
    assert run(*words, "--json").out != run(*words, "--seed", "1", "--json").out


@pytest.mark.long
def test_replicas_that_come_and_go_are_counted(tmp_path: Path) -> None:
    words = ("--rate", "4000", "--count", "400", "--lengths", "prompt=20..200,output=~60")
    scaled = ("--autoscale", "1..3:requests=4", "--scale-window", "4ms", "--scale-delay", "10ms")
    page = tmp_path / "page.html"
    more = ("--fail", "0@20ms", "--start-time", "3ms", "--price", "2", "--html", str(page))
    actual = answer(*words, *scaled, *more)
    pool = actual["pools"]["server"]
    assert (pool["replicas"], pool["failed"], pool["start_seconds"]) == (3, 1, 0.003)
    assert pool["started"] >= 2
    assert 1 < pool["held"] < 3
    assert pool["replica_seconds"] == pytest.approx(pool["held"] * actual["seconds"])
    assert actual["rank_seconds"] == pool["replica_seconds"]
    assert actual["cost"] == pytest.approx(
        actual["rank_seconds"] / 3600 * 2 / actual["output_tokens"] * 1e6
    )
    assert actual["per_rank"] == pytest.approx(actual["output_tokens"] / actual["rank_seconds"])
    kept = [moment["held"] for moment in actual["over_time"]["server"]]
    assert kept[0] == 1
    assert max(kept) == 3
    assert "<h2>Replicas that occupy ranks, and those that take requests</h2>" in (
        page.read_text(encoding="utf-8")
    )
    text = run(*words, *scaled, *more).out
    assert "1 failure" in text
    assert "rank-hours at 2" in text


@pytest.mark.long
def test_a_start_takes_as_long_as_the_weights_come_from_the_host() -> None:
    words = ("--rate", "50", "--count", "5", *LENGTHS, "--fail", "0@0ms")
    one, two = (answer(*words, "--tp", n)["pools"]["server"] for n in ("1", "2"))
    bandwidth = library.machine("h100-sxm").host.bandwidth.value
    assert one["start_seconds"] == pytest.approx(WEIGHTS / bandwidth, rel=1e-6)
    assert two["start_seconds"] == pytest.approx(one["start_seconds"] / 2, rel=0.01)


@pytest.mark.long
def test_python_says_the_same() -> None:
    sizes = {"L": 2, "D": 256, "F": 512, "V": 1024, "H": 8, "G": 4, "K": 32}
    actual = library.job("llama3-8b", sizes=sizes).serve_requests(
        "h100-sxm", rate=300, count=25, lengths="prompt=20..200,output=~30", route="round-robin"
    )
    words = ("--rate", "300", "--count", "25", *LENGTHS, "--route", "round-robin")
    assert actual.as_json() == answer(*words)
    assert str(actual) == run(*words).out
    assert actual.plot().startswith("<svg")
    assert "<h2>Share of time and cache in use</h2>" in actual.page()
    with pytest.raises(library.DiagnosticError, match="no arrivals of requests are given"):
        library.job("llama3-8b", sizes=sizes).serve_requests("h100-sxm")


def test_measured_kernels_win(tmp_path: Path) -> None:
    """A sequence alone: a product of each layer that takes longer makes each of its tokens but the
    first one late by that."""
    table = tmp_path / "table.csv"
    load = ("--concurrency", "1", "--count", "2", "--lengths", "prompt=32,output=8")
    answers = list[dict[str, Any]]()
    for microseconds in (200, 400):
        table.write_text(
            f"kind,dtype,extents,microseconds\nmatmul,bf16,1x1x256x512,{microseconds}\n"
        )
        answers.append(answer(*load, "--step-grid", "exact", "--measured", str(table)))
    first, second = (each["times"] for each in answers)
    assert second["tpot"]["mean"] - first["tpot"]["mean"] == pytest.approx(2 * 200e-6)
    assert second["ttft"] == first["ttft"]
    assert answers[0]["found"]["matched"] == answers[1]["found"]["matched"] > 0
    assert_schema("requests", answers[0])
    table.write_text(table.read_text().replace("1x1x256x512", "1x1x256x511"))
    ran = run(*load, "--measured", str(table))
    assert "no kernel or collective of these steps was measured" in ran.err


def test_a_swap_is_of_positions_that_the_model_has() -> None:
    load = ("--batch-of", "2", "--prompt", "32")
    ran = run(*load, "--cache-blocks", "64", "--preempt", "swap")
    assert ran.code == 0
    assert "position" not in ran.err


def test_two_half_batches_share_prompts_and_sequences() -> None:
    """Each half has a part of a prompt, and a sequence that is alone is in both; a rollout decodes
    as a steady load of as many sequences."""
    surface, exact = StepSurface(known, groups=4, halves=2), ExactSteps(known, groups=4, halves=2)
    for chunks in ([(900, 0), (30, 0)], [(256, 64), (256, 64)]):
        assert surface.mixed(8, 800, chunks) == exact.mixed(8, 800, chunks), chunks
    parts = ExactSteps(known, groups=2).mixed(0, 0, [(50, 0), (50, 50)])
    assert ExactSteps(known, groups=2, halves=2).mixed(0, 0, [(100, 0)]) == parts
    job = ("serve", "mixtral-8x7b", "--set", "L=2", "--ep", "2", "--dp", "2", "--two-batch-overlap")
    words = (*job, *H100, "--prompt", "32", "--output-tokens", "200", "--json")
    steady = json.loads(stagec(*words, "--batches", "3,8").out)["points"]
    over = json.loads(stagec(*words, "--batch-of", "8").out)
    assert over["times"]["tpot"]["mean"] == pytest.approx(steady[1]["tpot"], rel=0.05)
    assert "its step is that of 4" in steady[0]["cautions"][0]


def test_tiers_are_of_the_pod_that_computes_prompts() -> None:
    """What a device has no room for comes back from the host, and from a disk what that has no room
    for; prompts are computed or loaded once."""
    pods = ("--serve", "disaggregated", "--prefill", "tp=1", "--decode", "tp=1", "--prompt", "200")
    load = ("--rate", "20", "--turns", "5", "--pause", "1s", "--count", "20")
    sizes = ("--lengths", "prompt=200,output=20", "--cache-blocks", "80")
    tiers = ("--host-cache", "8MiB", "--disk-cache", "1GiB", "--disk-bandwidth", "6.8")
    pools = answer(*pods, *load, *sizes, *tiers)["pools"]
    prefill, decode = pools["prefill"], pools["decode"]
    assert set(prefill["loaded"]) == {"host", "disk"}
    assert prefill["hits"] >= sum(prefill["loaded"].values())
    assert (decode["loaded"], decode["hits"]) == ({}, 0)
    without = answer(*pods, *load, *sizes)["pools"]["prefill"]
    computed = {p["computed"] + p["hits"] - p["lost"] for p in (prefill, without)}
    assert len(computed) == 1
    assert prefill["computed"] < without["computed"]


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_pile_up_are_remarked(seed: int) -> None:
    """One server that takes a second for each request. It keeps up with 0.8 per second, and not
    with 1.25, of which a fifth is left in the second half as in the first."""
    source = random.Random(seed)

    def text(gap: float) -> str:
        at, free, jobs = 0.0, 0.0, list[ServedRequest]()
        for number in range(1000):
            at += source.expovariate(1 / gap)
            free = max(free, at) + 1
            begins, ends = round(at * SECOND), round(free * SECOND)
            jobs.append(ServedRequest(Request(0, 1, 1), number, arrival=begins, last=ends))
        return backlog_text(jobs, jobs[-1].arrival)

    assert text(1.25) == ""
    arrive, end = map(float, re.findall(r"([\d.]+) (?:arrive|end)", text(0.8)))
    assert arrive == pytest.approx(1.25, rel=0.15)
    assert end == pytest.approx(1, rel=0.05)
    assert backlog_text([ServedRequest(Request(0, 1, 1), 1, arrival=0, last=5)], 0) == ""


def test_a_rate_beyond_the_server_is_remarked() -> None:
    slow = (*LENGTHS, "--max-batch", "1", "--count", "200")
    assert "requests pile up" in run("--rate", "1000", *slow).err
    assert "pile up" not in run("--rate", "2", *slow).err
    assert "pile up" not in run("--concurrency", "50", *slow).err


def test_a_warm_up_is_served_and_not_measured() -> None:
    """What remains are the times of the other requests, of the same run."""
    load = (*LENGTHS, "--rate", "50", "--count", "60", "--ttft", "20ms")
    whole, late = answer(*load), answer(*load, "--warmup", "40")
    assert (whole["measured"], late["measured"], late["served"]) == (60, 20, 60)
    for name in ("seconds", "output_tokens", "pools"):
        assert late[name] == whole[name]
    assert late["times"] != whole["times"]
    none = run(*load, "--warmup", "60")
    assert none.code == 1
    assert "--warmup 60 leaves none of the 60 requests" in none.err
