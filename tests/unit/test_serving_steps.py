"""Requests, the batching policy, and the steps that follow: against a server that counts tokens one
by one, and against what a steady load must look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir_spec.strategy.scheduler import ALONE, SchedulerRule
from stagec.serving.adapters import AdapterSlots
from stagec.serving.arrivals import requests_of
from stagec.serving.policy import (
    BatchingPolicy,
    LiveRequest,
    ServerLimits,
    ServerState,
    StepPlan,
    find_policy,
)
from stagec.serving.requests import HASH_BLOCK, Request, read_requests
from stagec.serving.simulate import Simulation
from stagec.serving.step import SequenceClass, Step, parse_step, step_of
from stagec.serving.stepped import SteppedReplica, stepped_server
from stagec.support.diagnostics import DiagnosticError
from tests.support import examples

TICK = 1000
NANOSECOND = 10**6
ENDLESS = 1_000_000


def server(
    requests: Sequence[Request],
    limits: ServerLimits,
    of: Callable[[Step], int] = lambda step: TICK,
    *,
    stages: int = 1,
    **how: Any,
) -> tuple[SteppedReplica, Simulation]:
    """A server that has served; `of` has the nanoseconds of a step on each stage."""

    def time(step: Step) -> tuple[int, int]:
        return stages * of(step) * NANOSECOND, of(step) * NANOSECOND

    replica, run = stepped_server(requests, limits, time, ENDLESS, stages=stages, **how)
    run.run()
    replica.check(len(requests) - len(run.done))
    return replica, run


def served(
    requests: Sequence[Request], limits: ServerLimits, **how: Any
) -> tuple[list[Step], Simulation]:
    """All steps of a server, one by one."""
    replica, run = server(requests, limits, **how)
    return [each.step for each in replica.steps], run


# -- a server that counts tokens one by one --------------------------------------------------------


@dataclass(eq=False)
class _Slow:
    """One request of the slow server."""

    arrival: int
    known: int
    last: int
    cached: int = 0


class _SlowServer:
    """First come first served as vLLM v1 says it, with a cache whose blocks are counted anew each
    time, and time that passes tick by tick."""

    def __init__(self, requests: Sequence[Request], limits: ServerLimits) -> None:
        self.coming = [_Slow(r.arrival, r.prompt, r.prompt + r.output) for r in requests]
        self.limits, self.now = limits, 0
        self.waiting: list[_Slow] = []
        self.running: list[_Slow] = []

    def steps(self) -> list[Counter[tuple[int, int, int]]]:
        actual: list[Counter[tuple[int, int, int]]] = []
        while self.coming or self.waiting or self.running:
            while self.coming and self.coming[0].arrival <= self.now:
                self.waiting.append(self.coming.pop(0))
            if not self.waiting and not self.running:
                self.now = self.coming[0].arrival
                continue
            actual.append(Counter(self._step()))
            self.now += TICK
        return actual

    def _step(self) -> list[tuple[int, int, int]]:
        added: list[tuple[_Slow, tuple[int, int, int]]] = []
        budget, i, gave_up = self.limits.tokens, 0, False
        while i < len(self.running) and budget > 0:
            one = self.running[i]
            add = min(one.known - one.cached, budget)
            while not self._fits(one, add):
                victim = self.running.pop()
                victim.cached, gave_up = 0, True
                self.waiting.insert(0, victim)
                if victim is one:
                    break
            if i < len(self.running):
                added.append((one, (add, one.cached, int(add == one.known - one.cached))))
                one.cached += add
                budget -= add
            i += 1
        while not gave_up and self.waiting and budget > 0 and self._lets_in(budget):
            one = self.waiting.pop(0)
            self.running.append(one)
            one.cached = min(one.known, budget)
            added.append((one, (one.cached, 0, int(one.cached == one.known))))
            budget -= one.cached
        for one, (_, _, sampled) in added:
            one.known += sampled
        self.running = [r for r in self.running if r.known < r.last]
        return [about for _, about in added]

    def _fits(self, one: _Slow, add: int) -> bool:
        """Whether the blocks are there for more tokens of a sequence, which runs or is let in."""
        kept = {r: r.cached for r in self.running} | {one: one.cached + add}
        blocks = sum(-(-tokens // self.limits.block) for tokens in kept.values())
        return self.limits.blocks is None or blocks <= self.limits.blocks

    def _lets_in(self, budget: int) -> bool:
        one = self.waiting[0]
        return len(self.running) < self.limits.sequences and self._fits(one, min(one.known, budget))


_REQUEST = st.tuples(st.integers(0, 4 * TICK), st.integers(1, 40), st.integers(1, 12))


@pytest.mark.long
@given(
    gaps=st.lists(_REQUEST, min_size=1, max_size=8),
    tokens=st.integers(1, 48),
    sequences=st.integers(1, 6),
    block=st.sampled_from([1, 4, 16]),
    more=st.none() | st.integers(0, 12),
)
@examples(150)
def test_steps_are_those_of_a_server_that_counts_tokens(
    gaps: list[tuple[int, int, int]], tokens: int, sequences: int, block: int, more: int | None
) -> None:
    at, requests = 0, list[Request]()
    for gap, prompt, output in gaps:
        at += gap
        requests.append(Request(at, prompt, output))
    most = max(-(-(r.prompt + r.output) // block) for r in requests)
    limits = ServerLimits(tokens, sequences, None if more is None else most + more, block)
    steps, run = served(requests, limits)
    expected = _SlowServer(requests, limits).steps()
    assert [_counter(s) for s in steps] == expected
    assert len(run.done) == len(requests)


@given(
    gaps=st.lists(_REQUEST, min_size=1, max_size=8),
    tokens=st.integers(1, 48),
    groups=st.integers(2, 4),
    depth=st.integers(1, 2),
)
@examples(60)
def test_groups_that_step_together_share_the_requests(
    gaps: list[tuple[int, int, int]], tokens: int, groups: int, depth: int
) -> None:
    """Each request is served once, all tokens are computed once, and the step of all groups has
    at least the sequences, tokens and pairs of each of them."""
    arrivals = accumulate(gap for gap, _, _ in gaps)
    requests = [Request(at, p, o) for at, (_, p, o) in zip(arrivals, gaps, strict=True)]
    replica, run = server(requests, ServerLimits(tokens, 3), stages=depth, groups=groups)
    counted, sampled = 0, 0
    for each in replica.steps:
        assert 1 <= len(each.groups) <= groups
        for step in each.groups:
            assert step.tokens <= tokens
            assert step.sequences <= each.step.sequences
            assert step.tokens <= each.step.tokens
            assert step.sampled <= each.step.sampled
            assert step.pairs <= each.step.pairs
            counted += step.tokens
            sampled += step.sampled
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    assert counted == sum(r.prompt + r.output - 1 for r in requests)
    assert sampled == sum(r.output for r in requests)


def test_groups_wait_for_the_slowest() -> None:
    """Of two groups one has a prompt, the other decodes: a step takes as long as both padded."""
    requests = [Request(0, 8, 1), Request(0, 2, 3)]
    replica, run = server(requests, ServerLimits(64, 4), lambda step: step.tokens, groups=2)
    actual = [(str(each.step), each.end // NANOSECOND) for each in replica.steps]
    assert actual == [("prefill=1x8+0", 8), ("decode=1x2", 9), ("decode=1x3", 10)]
    assert {j.number: j.first // NANOSECOND for j in run.done} == {1: 8, 2: 8}


def _counter(step: Step) -> Counter[tuple[int, int, int]]:
    return Counter({(c.new, c.cached, c.sampled): c.count for c in step.classes})


@given(gaps=st.lists(_REQUEST, min_size=1, max_size=8), depth=st.integers(1, 4))
@examples(60)
def test_every_token_is_added_once_and_never_before_it_is_known(
    gaps: list[tuple[int, int, int]], depth: int
) -> None:
    requests = [Request(0, prompt, output) for _, prompt, output in gaps]
    replica, _ = server(requests, ServerLimits(32, 4), stages=depth)
    assert all(each.after <= depth for each in replica.steps)
    added = sum(each.step.tokens for each in replica.steps)
    sampled = sum(each.step.sampled for each in replica.steps)
    assert added == sum(r.prompt + r.output - 1 for r in requests)
    assert sampled == sum(r.output for r in requests)


def test_with_stages_a_sequence_waits_for_its_token() -> None:
    """One request on four stages: a step in four; four requests: each step has one of them."""
    one, _ = served([Request(0, 8, 5)], ServerLimits(8, 4), stages=4)
    assert [str(s) for s in one] == ["prefill=1x8+0", *(f"decode=1x{8 + i}" for i in range(4))]
    alone, _ = server([Request(0, 8, 3)], ServerLimits(8, 4))
    assert [each.after for each in alone.steps] == [0, 1, 1]
    replica, run = server([Request(0, 8, 5)] * 4, ServerLimits(8, 4), stages=4)
    assert [each.after for each in replica.steps] == [0] * 4 + [4] * 16
    assert run.done[-1].last == (4 * 5 + 3) * TICK * NANOSECOND


def test_a_step_does_not_overtake_another_one() -> None:
    """A short step behind a long one is done when it has passed the last stage behind it."""
    requests = [Request(0, 60, 1), Request(0, 2, 1)]
    replica, _ = server(requests, ServerLimits(60, 4), lambda step: step.tokens, stages=2)
    assert [each.end // NANOSECOND for each in replica.steps] == [120, 122]


# -- steady load: facts of a mix -------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "output", "running"), [(512, 128, 32), (100, 300, 50)])
def test_steady_load_has_the_mix_of_theory(prompt: int, output: int, running: int) -> None:
    """With `running` requests always there and a budget that is never full, each decode token
    brings prompt/output tokens of prompts, and contexts are spread evenly: their mean over decodes
    is prompt + output/2 (positions prompt .. prompt + output - 2)."""
    requests = [Request(0, prompt, output)] * (running * 12)
    steps, _ = served(requests, ServerLimits(1 << 20, running))
    # sequences begin together, and with the same lengths they would stay so
    decode = Counter[int]()
    total = prefill = 0
    for step in steps:
        for c in step.classes:
            if c.kind == "decode":
                decode[c.cached] += c.count
            total, prefill = total + c.tokens, prefill + c.tokens * (c.kind != "decode")
    assert Fraction(prefill, total - prefill) == Fraction(prompt, output - 1)
    assert set(decode) == set(range(prompt, prompt + output - 1))
    assert len(set(decode.values())) == 1
    mean = Fraction(sum(c * n for c, n in decode.items()), sum(decode.values()))
    assert mean == prompt + Fraction(output - 2, 2)


def test_steady_load_of_spread_arrivals_fills_each_step_alike() -> None:
    """A request every `output / running` steps: each step has its running - 1 or so decodes, and
    prompt * running / output tokens of prompts in the mean; in the middle of the run exactly."""
    prompt, output, running = 512, 128, 32
    gap = output // running * TICK
    requests = [Request(i * gap, prompt, output) for i in range(running * 8)]
    steps, _ = served(requests, ServerLimits(1 << 20, running))
    middle = steps[2 * output : 6 * output]
    decodes = [sum(c.count for c in s.classes if c.kind == "decode") for s in middle]
    prompts = sum(c.tokens for s in middle for c in s.classes if c.kind != "decode")
    assert prompts == len(middle) * prompt * running // output
    assert Fraction(sum(decodes), len(middle)) == Fraction(running * (output - 1), output)
    contexts = sum(c.count * c.cached for s in middle for c in s.classes if c.kind == "decode")
    assert Fraction(contexts, sum(decodes)) == prompt + Fraction(output - 2, 2)


def test_budget_goes_to_decodes_first() -> None:
    steps, _ = served([Request(0, 4, 9), Request(0, 20, 2)], ServerLimits(8, 4))
    assert [str(s) for s in steps[:5]] == [
        "chunk=1x4+0,prefill=1x4+0",
        "decode=1x4,chunk=1x7+4",
        "decode=1x5,chunk=1x7+11",
        "decode=1x6,prefill=1x2+18",
        "decode=1x7,decode=1x20",
    ]


def test_a_scheduler_holds_for_recorded_steps() -> None:
    """Prompts alone: sequences that decode wait for the second prompt."""
    rule = SchedulerRule(ALONE)
    steps, _ = served([Request(0, 4, 4), Request(1, 6, 2)], ServerLimits(64, 4), scheduler=rule)
    assert list(map(str, steps)) == [
        "prefill=1x4+0",
        "prefill=1x6+0",
        "decode=1x4,decode=1x6",
        "decode=1x5",
        "decode=1x6",
    ]


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    requests = [Request(at, HASH_BLOCK + 8, 1, prefix=(7,)) for at in (0, 9 * TICK)]
    steps, _ = served(requests, ServerLimits(1024, 4, 100), prefix_block=HASH_BLOCK)
    assert list(map(str, steps)) == [f"prefill=1x{HASH_BLOCK + 8}+0", f"prefill=1x8+{HASH_BLOCK}"]


def test_prompts_of_groups_wait_for_each_other() -> None:
    """Two groups with a queue each. With `balance` the prompt of one waits until the other one has
    a prompt too, and both have it in one step; if none comes, for at most so many steps."""
    later = [Request(2 * TICK, 6, 2), Request(4 * TICK, 6, 2)]
    requests = [Request(0, 4, 20), Request(0, 4, 20), *later]
    limits = ServerLimits(64, 4)

    def prompts(rule: SchedulerRule, count: int = 4) -> list[int]:
        replica, _ = server(requests[:count], limits, groups=2, scheduler=rule)
        steps = enumerate(each.groups for each in replica.steps)
        return [n for n, each in steps for step in each if "prefill" in str(step)]

    assert prompts(SchedulerRule()) == [0, 0, 2, 4]
    assert prompts(SchedulerRule(balance=9)) == [0, 0, 4, 4]
    assert prompts(SchedulerRule(balance=9, gather=3)) == [0, 0, 7, 7]
    assert prompts(SchedulerRule(balance=5), 3) == [0, 0, 7]


def test_a_step_waits_for_the_adapter_of_a_request() -> None:
    """With one slot, the second adapter waits for the first one to leave it; each load is time
    before the step that begins its request."""
    requests = [Request(0, 4, 3, adapter=name) for name in "aab"]
    load = 10 * TICK * NANOSECOND

    def slots() -> AdapterSlots:
        return AdapterSlots(1, load)

    replica, run = server(requests, ServerLimits(64, 4), slots=slots)
    assert list(map(str, (each.step for each in replica.steps))) == [
        "prefill=2x4+0",
        *("decode=2x4", "decode=2x5"),
        "prefill=1x4+0",
        *("decode=1x4", "decode=1x5"),
    ]
    firsts = [job.first // NANOSECOND for job in sorted(run.done, key=lambda job: job.number)]
    assert firsts == [11 * TICK, 11 * TICK, (13 + 11) * TICK]


@pytest.mark.parametrize("batch", [0, 1, 3, 9])
def test_a_batch_on_stages_has_its_share_or_what_is_stated(batch: int) -> None:
    rule = SchedulerRule(batch=batch)
    steps, _ = served([Request(0, 4, 9)] * 8, ServerLimits(64, 8), stages=2, scheduler=rule)
    assert max(step.sequences for step in steps) == min(batch or 4, 8)


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_says_what_is_in_it() -> None:
    step = parse_step("decode=64x4096, prefill=1x2048+512, chunk=2x16+0, verify=8x3+100")
    assert parse_step(str(step)) == step
    assert (step.tokens, step.sampled, step.sequences) == (64 + 2048 + 32 + 24, 64 + 1 + 24, 75)
    pairs = 64 * 4097 + sum(512 + i for i in range(1, 2049)) + 2 * 136 + 8 * (101 + 102 + 103)
    assert step.pairs == pairs


def test_rounding_makes_classes_one() -> None:
    step = step_of([SequenceClass(1, c, 1) for c in (1, 15, 16, 17)])
    assert str(step.rounded(16)) == "decode=3x16,decode=1x32"
    assert step.rounded(1) is step


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the step has no sequences"),
        ("decode=4", "is not a class of sequences"),
        ("decode=4x8+2", "expected decode=COUNTxCONTEXT"),
        ("prefill=1x8", r"expected prefill=COUNTxNEW\+CACHED"),
        ("decode=0x8", "has no sequences"),
        ("chunk=1x0+8", "has no new tokens"),
        ("think=1x8+0", "is not a class of sequences"),
        (f"decode=1x{10**30}", "has a number above"),
        (",".join(["decode=1x1"] * 2000), "2,000 classes"),
    ],
)
def test_what_is_no_step(text: str, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        parse_step(text)


# -- requests --------------------------------------------------------------------------------------

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio\n0.25,10,2,5\n1.000000001,7,1,7\n"
SIMULATOR = (
    '{"input_toks": 10, "output_toks": 2, "arrival_time_ns": 250000000, "ids": [1]}\n\n'
    '{"input_toks": 7, "output_toks": 1, "arrival_time_ns": 1000000001}\n'
)
OWN = "arrival, prompt, output\n0.25,10,2\n1.000000001,7,1\n"


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", VIDUR), ("a.jsonl", SIMULATOR), ("b.csv", OWN)]
)
def test_three_forms_of_files_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    actual = [(r.arrival, r.prompt, r.output) for r in read_requests(tmp_path / name)]
    assert actual == [(250_000_000, 10, 2), (1_000_000_001, 7, 1)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv' contains no requests"),
        ("a.csv", "arrival,prompt,output\n", "a.csv' contains no requests"),
        ("a.jsonl", "", "a.jsonl' contains no requests"),
        ("a.csv", "arrival,prompt,prompt,output\n1,2,3,4\n", "two columns are 'prompt'"),
        ("a.jsonl", '{"arrival": 1, "prompt": 2, "prompt": 3}', "duplicate keys"),
        ("a.csv", "arrival,prompt,output\n1,2,3\n0.5,2,3\n", "before the one above it"),
        ("a.csv", "arrival,prompt,output\n1,2,0\n", "the output .* is '0'"),
        ("a.csv", "arrival,prompt,output\n1,2.5,1\n", "the prompt .* is '2.5'"),
        ("a.csv", "arrival,prompt,output\n-1,2,1\n", "the arrival .* is '-1'"),
        ("a.csv", "arrival,prompt,output\nnan,2,1\n", "the arrival .* is 'nan'"),
        ("a.csv", "arrival,prompt,output\n1e999999999,2,1\n", "the arrival .* is '1e999999999'"),
        ("a.csv", "arrival,prompt,output\n1,1e30,1\n", "the prompt .* is '1e30'"),
        ("a.csv", "arrival,prompt,output\n1,2\n", "2 cells"),
        ("a.csv", "prompt,output\n1,2\n", "does not say when it arrives"),
        ("a.csv", "arrival,prompt\n1,2\n", "does not say the tokens of its output"),
        ("a.csv", 'arrival,prompt,output\n1,"2,3\n', "not CSV"),
        ("a.csv", b"arrival,prompt,output\n\xff,1,1\n", "not UTF-8"),
        ("a.csv", "x" * (1 << 21), "longer than"),
        ("a.jsonl", "[1]\n", "not a JSON object"),
        ("a.jsonl", "{", "not JSON"),
        ("a.jsonl", "[" * 100_000, "not JSON"),
        ("a.jsonl", '{"arrival": NaN, "prompt": 1, "output": 1}', "the arrival"),
        ("a.jsonl", '{"arrival": 0, "prompt": true, "output": 1}', "the prompt .* is True"),
        ("a.jsonl", '{"arrival": 0, "prompt": [1], "output": 1}', "the prompt"),
        ("a.txt", "1 2 3", "neither a .csv nor a .jsonl"),
    ],
)
def test_what_is_no_list_of_requests(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DiagnosticError, match=message):
        read_requests(tmp_path / name)


def test_poisson_is_the_same_for_a_seed_and_has_its_rate(tmp_path: Path) -> None:
    text = "poisson:rate=8,count=4000,prompt=~300,output=64..256,seed=3"
    actual = requests_of(text)
    again = requests_of(text)
    assert [(r.arrival, r.prompt, r.output) for r in actual] == [
        (r.arrival, r.prompt, r.output) for r in again
    ]
    # the mean of 4000 gaps has a deviation of 1/sqrt(4000) = 1.6%
    assert abs(actual[-1].arrival / 1e9 - 500) < 500 * 0.08
    assert abs(sum(r.prompt for r in actual) / 4000 - 300) < 300 * 0.08
    assert {r.output for r in actual} == set(range(64, 257))
    assert requests_of(text.replace("seed=3", "seed=4"))[0].arrival != actual[0].arrival
    (tmp_path / "l.csv").write_text("prompt,output\n5,6\n7,8\n")
    drawn = requests_of(f"poisson:rate=1/2,count=50,lengths={tmp_path / 'l.csv'}")
    assert {(r.prompt, r.output) for r in drawn} == {(5, 6), (7, 8)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate=0,count=1,prompt=1,output=1", "rate is '0'"),
        ("rate=1e9999,count=1,prompt=1,output=1", "rate is"),
        ("count=1,prompt=1,output=1", "rate is ''"),
        ("rate=1,count=0,prompt=1,output=1", "count is '0'"),
        ("rate=1,count=99999999,prompt=1,output=1", "count is"),
        ("rate=1,count=1,prompt=0,output=1", "prompt is '0'"),
        ("rate=1,count=1,prompt=9..3,output=1", "prompt is '9..3'"),
        ("rate=1,count=1,prompt=1", "expects prompt and output"),
        ("rate=1,count=1,prompt=1,output=1,lengths=x.csv", "expects prompt and output"),
        ("rate=1,rate=2", "given twice"),
        ("speed=1", "not an option of poisson"),
        ("rate=1/99999999999,count=9999,prompt=1,output=1", "more than a century"),
    ],
)
def test_what_is_no_process(text: str, message: str) -> None:
    with pytest.raises(DiagnosticError, match=message):
        requests_of(f"poisson:{text}")


# -- policies of others ----------------------------------------------------------------------------


class _Chosen(BatchingPolicy):
    """A policy that says what it is reported."""

    name = "chosen"
    summary = "for tests"

    def __init__(self, choose: Callable[[ServerState], StepPlan]) -> None:
        self._choose = choose

    def plan(self, state: ServerState) -> StepPlan:
        return self._choose(state)


def _first(state: ServerState) -> LiveRequest:
    return [*state.running, *state.waiting][0]


def _no_plan(state: ServerState) -> StepPlan:
    return cast("StepPlan", [])


_WRONG: list[tuple[Callable[[ServerState], StepPlan], str]] = [
    (lambda s: StepPlan([]), "never serves request 1, which waits since 0 s: 2 are left"),
    (_no_plan, "gives a list as a step"),
    (lambda s: StepPlan([(_first(s), 99)]), "adds 99 tokens to request 1, which can add 8"),
    (lambda s: StepPlan([(_first(s), 0)]), "adds 0 tokens"),
    (lambda s: StepPlan([(_first(s), 1)] * 2), "twice in a step"),
    (lambda s: StepPlan([], [_first(s)]), "gives up the cache of request 1, which does not run"),
    (lambda s: StepPlan([(w, w.left) for w in s.waiting]), "fills step 1 with 16 tokens"),
    (lambda s: StepPlan([(w, 1) for w in s.waiting]), "2 sequences, and there is room for 1"),
]


@pytest.mark.parametrize(("choose", "message"), _WRONG)
def test_a_policy_that_errs_is_named(
    choose: Callable[[ServerState], StepPlan], message: str
) -> None:
    limits = ServerLimits(12, 1 if "sequences" in message else 2)
    with pytest.raises(DiagnosticError, match=message):
        served([Request(0, 8, 2), Request(0, 8, 2)], limits, policy=_Chosen(choose))


def test_a_policy_that_has_no_blocks_is_named() -> None:
    policy = _Chosen(lambda s: StepPlan([(w, w.left) for w in s.waiting]))
    with pytest.raises(
        DiagnosticError, match="with 4 blocks of the cache, and there is room for 3"
    ):
        served([Request(0, 8, 1)] * 2, ServerLimits(64, 4, 3, 4), policy=policy)


def test_no_more_steps_than_are_asked_for() -> None:
    replica, run = stepped_server(
        [Request(0, 8, 9)] * 4, ServerLimits(16, 4), lambda step: (2, 1), 3, stages=2
    )
    run.run()
    assert len(replica.steps) == 3
    replica.check(4 - len(run.done))


class _WrittenOut(BatchingPolicy):
    """First come first served, as `stagec.serving.replica` has it, over all sequences: those that
    run come first, each with all tokens that it can add within the budget; then requests are
    admitted while tokens, sequences and blocks last. If blocks run out, the sequence that came last
    is preempted, and no request is admitted (vllm/v1/core/sched/scheduler.py, `schedule`)."""

    name = "written-out"
    summary = "for tests"

    def plan(self, state: ServerState) -> StepPlan:
        limits, free, budget = state.limits, state.free, state.limits.tokens
        running, work, preempted = (
            list(state.running),
            list[tuple[LiveRequest, int]](),
            list[LiveRequest](),
        )
        place = 0
        while place < len(running) and budget:
            live = running[place]
            tokens = min(live.left, budget)
            needed = state.needs(live, tokens) if tokens else 0
            while free is not None and needed > free and len(running) > place:
                last = running.pop()
                preempted.append(last)
                free += limits.blocks_for(last.cached)
            if place == len(running):
                break
            if tokens:
                work.append((live, tokens))
            budget -= tokens
            free = None if free is None else free - needed
            place += 1
        if preempted:
            return StepPlan(work, preempted)
        count = len(running)
        for live in state.waiting:
            tokens = min(live.left, budget)
            needed = state.needs(live, tokens)
            if not tokens or count == limits.sequences or (free is not None and needed > free):
                break
            work.append((live, tokens))
            budget -= tokens
            count += 1
            free = None if free is None else free - needed
        return StepPlan(work)


@given(
    gaps=st.lists(_REQUEST, min_size=1, max_size=12),
    tokens=st.integers(1, 48),
    sequences=st.integers(1, 6),
    more=st.none() | st.integers(0, 6),
    groups=st.integers(1, 3),
    fixed=st.integers(0, 2),
)
@examples(150)
def test_a_policy_that_is_written_out_gives_the_steps_of_a_replica(
    gaps: list[tuple[int, int, int]],
    tokens: int,
    sequences: int,
    more: int | None,
    groups: int,
    fixed: int,
) -> None:
    """Also those of each group of ranks, when each request is done, and preemptions."""
    arrivals = accumulate(gap for gap, _, _ in gaps)
    requests = [Request(at, p, o) for at, (_, p, o) in zip(arrivals, gaps, strict=True)]
    limits = ServerLimits(tokens, sequences, None, 4, fixed=fixed)
    if more is not None:
        blocks = more + max(limits.blocks_for(r.prompt + r.output) for r in requests)
        limits = replace(limits, blocks=blocks)
    own, planned = (
        server(requests, limits, groups=groups, policy=policy) for policy in (None, _WrittenOut())
    )
    assert own[0].steps == planned[0].steps
    ends = [
        [(j.number, j.first, j.last, j.preempted) for j in run.done] for _, run in (own, planned)
    ]
    assert ends[0] == ends[1]


@given(
    gaps=st.lists(_REQUEST, min_size=1, max_size=12),
    stages=st.integers(2, 4),
    more=st.integers(0, 6),
)
@examples(60)
def test_a_policy_on_stages_serves_every_request(
    gaps: list[tuple[int, int, int]], stages: int, more: int
) -> None:
    """It may preempt sequences whose token is under way, which is then computed again."""
    arrivals = accumulate(gap for gap, _, _ in gaps)
    requests = [Request(at, p, o) for at, (_, p, o) in zip(arrivals, gaps, strict=True)]
    blocks = more + max(-(-(r.prompt + r.output) // 4) for r in requests)
    replica, run = server(
        requests, ServerLimits(32, 4, blocks, 4), stages=stages, policy=_WrittenOut()
    )
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    (group,) = replica.groups
    assert group.free == group.room
    added = sum(each.step.tokens for each in replica.steps)
    assert added >= sum(r.prompt + r.output - 1 for r in requests)


def test_no_policy_of_that_name() -> None:
    with pytest.raises(DiagnosticError, match="no batching policy 'fcfz'"):
        find_policy("fcfz")
