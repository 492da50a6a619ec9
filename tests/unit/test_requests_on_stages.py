"""Requests over time on pipeline stages: beside a simulator that goes stage by stage and token by
token, and what holds of every server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir_spec.strategy.scheduler import ALONE, BESIDE, SchedulerRule
from stagec.serving.arrivals import renewal
from stagec.serving.fleet import Failure
from stagec.serving.pipelined import PipelinedReplica
from stagec.serving.policy import ServerLimits
from stagec.serving.requests import HASH_BLOCK, Request
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Simulation
from stagec.serving.step_times import StepLine
from tests.support import examples, stagec
from tests.unit.test_requests_over_time import (
    LIMITS,
    NANOSECOND,
    SHARES,
    Linear,
    cached_tokens,
    loads,
    that_share,
)


@dataclass(frozen=True)
class Stages:
    """Steps of so many stages that take as long, each as `Linear` says."""

    stages: int
    each: Linear = field(default_factory=Linear)

    def decode(self, count: int, total: int) -> StepLine:
        line = self.each.decode(count, total)
        return StepLine(line.at * self.stages, line.slope * self.stages, line.first, line.last)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        return self.stages * self.each.mixed(count, total, chunks)


class Counted(PipelinedReplica):
    """A replica that never gives pages that it has not."""

    def _give(self, pages: int) -> None:
        assert pages <= self.free
        super()._give(pages)


def on_stages(
    requests: Sequence[Request],
    limits: ServerLimits,
    stages: int,
    *,
    scheduler: SchedulerRule | None = None,
    swap: int = 0,
    prefills: bool = False,
    concurrency: int | None = None,
    failures: Sequence[Failure] = (),
    prefix_block: int = 0,
) -> Simulation:
    def replica(number: int, *, first: bool) -> PipelinedReplica:
        how: dict[str, Any] = {"scheduler": scheduler, "swap": swap, "prefills": first}
        how["prefix_block"] = prefix_block
        return Counted(number, limits, Stages(stages), pace=Linear(), stages=stages, **how)

    before = [replica(0, first=True)] if prefills else []
    run = Simulation(
        requests,
        [replica(len(before), first=False)],
        ROUTERS["least-loaded"],
        before,
        (lambda tokens: (0, 0)) if prefills else None,
        concurrency,
        failures,
    )
    run.run()
    return run


# -- stage by stage --------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A request: tokens of its prompt in a cache or on their way there, tokens that came out, and
    its batch."""

    request: Request
    cached: int = 0
    tokens: int = 0
    batch: int = -1
    first: int = 0
    last: int = 0

    @property
    def left(self) -> int:
        return self.request.prompt - self.cached


@dataclass
class Slow:
    """Stages one by one, every sequence, and a cache without a bound, in nanoseconds."""

    requests: Sequence[Request]
    limits: ServerLimits
    stages: int

    def __post_init__(self) -> None:
        self.jobs = [Job(r) for r in self.requests]
        self.coming, self.waiting, self.begun = list(self.jobs), list[Job](), list[Job]()
        self.batches = [list[Job]() for _ in range(self.stages)]  # those that decode
        self.free = [0] * self.stages  # when each stage has done its last step
        self.under: list[tuple[int, int, list[tuple[Job, int]], list[Job]]] = []
        self.done = 0

    def events(self) -> list[tuple[int, int]]:
        """When each request has its first and its last token."""
        while self.coming or self.waiting or self.under:
            arrivals = [job.request.arrival for job in self.coming[:1]]
            now = min([*arrivals, *(end for end, *_ in self.under[:1])])
            while self.coming and self.coming[0].request.arrival <= now:
                self.waiting.append(self.coming.pop(0))
            if self.under and self.under[0][0] == now:
                self.land(now)
            for i in range(self.stages):
                batch = (self.done + i) % self.stages
                if all(other != batch for _, other, *_ in self.under):
                    self.plan(batch, now)
        return [(job.first, job.last) for job in self.jobs]

    def land(self, now: int) -> None:
        _, self.done, chunks, decodes = self.under.pop(0)
        batch = self.batches[self.done]
        ends = [job for job, _ in chunks if job.batch == self.done and not job.left]
        for job in ends:
            self.begun.remove(job)
            batch.append(job)
        for job in [*decodes, *ends]:
            job.tokens += 1
            job.first, job.last = job.first or now, now
            if job.tokens == job.request.output:
                batch.remove(job)

    def plan(self, batch: int, now: int) -> None:
        decodes, chunks = list(self.batches[batch]), list[tuple[Job, int]]()
        budget = self.limits.tokens - len(decodes)
        for job in self.begun:
            if job.left and budget:
                chunks.append((job, min(job.left, budget)))
                budget -= chunks[-1][1]
        for job, _ in chunks:
            job.batch = batch
        while self.waiting and budget and self.has_place(batch):
            job = self.waiting.pop(0)
            job.batch = batch
            self.begun.append(job)
            chunks.append((job, min(job.left, budget)))
            budget -= chunks[-1][1]
        if not (decodes or chunks):
            return
        total = sum(job.request.prompt + job.tokens - 1 for job in decodes)
        pieces = [(tokens, job.cached) for job, tokens in chunks]
        took = Linear().mixed(len(decodes), total, pieces) // NANOSECOND
        for stage in range(self.stages):
            now = self.free[stage] = max(now, self.free[stage]) + took
        for job, tokens in chunks:
            job.cached += tokens
        self.under.append((now, batch, chunks, decodes))

    def has_place(self, batch: int) -> bool:
        mine = len(self.batches[batch]) + sum(job.batch == batch for job in self.begun)
        running = sum(map(len, self.batches)) + len(self.begun)
        sequences = self.limits.sequences
        return mine < -(-sequences // self.stages) and running < sequences


@examples(150)
@given(loads(), LIMITS, st.integers(1, 5))
def test_every_event_is_that_of_the_slow_simulator(
    requests: list[Request], limits: ServerLimits, stages: int
) -> None:
    endless = ServerLimits(limits.tokens, limits.sequences, None, limits.block)
    run = on_stages(requests, endless, stages)
    jobs = sorted(run.done, key=lambda j: j.number)
    assert [(j.first // NANOSECOND, j.last // NANOSECOND) for j in jobs] == Slow(
        requests, endless, stages
    ).events()


# -- what holds of every server --------------------------------------------------------------------

SCHEDULERS = st.builds(
    SchedulerRule,
    prompts=st.sampled_from([BESIDE, ALONE]),
    reserve=st.booleans(),
    poll=st.integers(1, 5),
    gather=st.integers(0, 5),
)


@examples(150)
@given(loads(), LIMITS, SCHEDULERS, st.integers(2, 4), st.sampled_from([0, 1000 * NANOSECOND]))
def test_requests_and_tokens_are_conserved(
    requests: list[Request], limits: ServerLimits, scheduler: SchedulerRule, stages: int, swap: int
) -> None:
    run = on_stages(requests, limits, stages, scheduler=scheduler, swap=swap)
    (replica,) = run.replicas
    tally = replica.tally
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    assert tally.computed + tally.decoded == cached_tokens(run) + tally.lost
    assert replica.free == replica.room
    assert not replica.load
    assert not (scheduler.reserve and tally.preempted)
    assert all(j.arrival < j.first <= j.last <= run.end for j in run.done)
    # Little's law
    assert run.area == sum(j.last - j.arrival for j in run.done)
    running, waiting = run.means(run.replicas)[1:3]
    assert (running + waiting) * run.end == pytest.approx(run.area, rel=1e-9)


@examples(50)
@given(loads(12), st.integers(0, 60_000), st.integers(1, 50_000), st.integers(0, 1))
def test_failures_and_pods_lose_no_requests(
    requests: list[Request], at: int, seconds: int, replica: int
) -> None:
    failure = Failure(replica, at * NANOSECOND, seconds * NANOSECOND)
    limits = ServerLimits(64, 8, 60, 4)
    run = on_stages(requests, limits, 3, prefills=True, failures=[failure])
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    assert all(r.free == r.room and not r.load for r in (*run.prefills, *run.replicas))
    tallies = [r.tally for r in (*run.prefills, *run.replicas)]
    computed = sum(t.computed + t.decoded for t in tallies)
    assert computed == cached_tokens(run) + sum(t.lost for t in tallies)


@examples(50)
@given(SHARES)
def test_pages_of_prefixes_are_conserved(each: list[tuple[int, int, int]]) -> None:
    requests = that_share(each)
    run = on_stages(requests, ServerLimits(700, 4, 300, 16), 3, prefix_block=HASH_BLOCK)
    (replica,) = run.replicas
    tally = replica.tally
    assert replica.free == replica.room
    assert tally.computed + tally.decoded + tally.hits == cached_tokens(run) + tally.lost


def test_more_load_waits_longer() -> None:
    limits, lengths = ServerLimits(256, 16, 800, 16), "prompt=lognormal:100:1.0,output=~30"
    runs = [
        on_stages(renewal(rate, 1.0, 500, lengths, 1, None, 1), limits, 3)
        for rate in (2e3, 1e4, 3e4, 9e4)
    ]
    latencies = [sum(j.last - j.arrival for j in run.done) for run in runs]
    assert latencies == sorted(latencies)


@pytest.mark.parametrize(("time", "pace"), [(4000, 1000), (4000, 1500), (3000, 1000)])
def test_a_round_is_all_stages_or_the_slowest_one_for_each_batch(time: int, pace: int) -> None:
    """Four sequences on four stages: a token takes as long as `steady_seconds` says."""
    limits, costs = ServerLimits(64, 4), [Linear(n, 0, 0) for n in (time, pace)]
    replica = Counted(0, limits, costs[0], pace=costs[1], stages=4)
    requests = [Request(i * 10, 2, 1001) for i in range(4)]
    run = Simulation(requests, [replica], ROUTERS["least-loaded"])
    run.run()
    for job in run.done:
        cached = sum(range(2, 1002)) / 1000  # each takes a nanosecond, on each stage
        mean = (job.last - job.first) / 1000 / NANOSECOND
        assert mean == pytest.approx(max(time + cached, 4 * (pace + cached)), rel=0.01)


def test_a_chunk_follows_another_one_through_the_stages() -> None:
    """Four chunks on four stages take seven times a stage, not sixteen."""
    limits = ServerLimits(10, 4)
    replica = Counted(0, limits, Linear(4000, 0, 0), pace=Linear(1000, 0, 0), stages=4)
    run = Simulation([Request(0, 40, 1)], [replica], ROUTERS["least-loaded"])
    run.run()
    assert run.done[0].first == pytest.approx(7000 * NANOSECOND, rel=0.02)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [("--pp", "2"), ("--pp", "4", "--stack", "vllm")])
def test_a_steady_load_is_that_of_batches(flags: tuple[str, ...]) -> None:
    words = ("serve", "llama3-8b", "--set", "L=8", *flags, "--machine", "h100-sxm", "--json")
    of = ("--prompt", "64", "--output-tokens", "1000")
    steady = json.loads(stagec(*words, *of, "--batches", "16", "--prompt-steps", "beside").out)
    over = json.loads(stagec(*words, *of, "--batch-of", "16", "--max-batch", "16").out)
    assert over["times"]["tpot"]["mean"] == pytest.approx(steady["points"][0]["tpot"], rel=0.01)
    assert over["steps"]["largest_error"] < 0.02


def test_chunks_of_a_prompt_are_those_of_batches() -> None:
    """Eight chunks pass four stages in eleven turns, whether requests come over time or not."""
    job = ("serve", "llama3-8b", "--set", "L=8", "--pp", "4", "--machine", "h100-sxm", "--json")
    words = (*job, "--prompt", "4096", "--output-tokens", "2")
    whole, parts = (
        json.loads(stagec(*words, "--batches", "1", "--chunk", size).out)["points"][0]["ttft"]
        for size in ("512", "4096")
    )
    one = json.loads(stagec(*words, "--concurrency", "1", "--count", "1", "--max-batch", "4").out)
    over = ("--concurrency", "1", "--count", "1", "--max-tokens", "512", "--max-batch", "4")
    several = json.loads(stagec(*words, *over).out)
    assert one["times"]["ttft"]["mean"] == pytest.approx(parts, rel=0.1)
    assert several["times"]["ttft"]["mean"] == pytest.approx(whole, rel=0.1)
    assert whole < 0.8 * parts


def test_attention_apart_has_its_turns_in_one_step(tmp_path: Path) -> None:
    """Both microbatches of a step have half of its sequences, over time and in two pods."""
    job = ("mixtral-8x7b", "--set", "L=2")
    load = ("--machine", "h100-sxm", "--prompt", "64", "--output-tokens", "100", "--json")
    apart, rest = ("--pp", "2", "--afd"), ("--prompt-steps", "beside")
    steady = json.loads(stagec("serve", *job, *apart, *load, *rest, "--batches", "16").out)
    over = json.loads(stagec("serve", *job, *apart, *load, "--batch-of", "16").out)
    pods = ("--serve", "disaggregated", "--prefill", "pp=2,afd", "--decode", "pp=2,afd")
    two = json.loads(stagec("serve", *job, *pods, *load, "--batches", "16").out)
    for each in (over["times"]["tpot"]["mean"], two["points"][0]["tpot"]):
        assert each == pytest.approx(steady["points"][0]["tpot"], rel=0.02)
    requests = tmp_path / "requests.csv"
    requests.write_text("arrival,prompt,output\n0,8,4\n")
    words = ("--serve", "mixed", *apart, "--requests", str(requests), "--dry-run")
    refused = stagec("compile", *job, *words)
    assert (refused.code, "--afd cannot be used with several steps" in refused.err) == (1, True)
