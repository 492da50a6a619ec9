"""Replicas that start, stop, fail and come back: beside a simulator that goes step by step, and
what holds of every server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.serving.arrivals import renewal
from stagec.serving.fleet import Autoscale, Failure, FleetPlan
from stagec.serving.policy import ServerLimits
from stagec.serving.requests import Request
from stagec.serving.simulate import Simulation
from tests.support import examples
from tests.unit.test_requests_over_time import (
    NANOSECOND,
    Linear,
    cached_tokens,
    disaggregated,
    loads,
    mean_latency,
    served,
)

LIMITS = ServerLimits(32, 4, None, 4)
RULES = st.sampled_from(["requests", "queue", "busy"])


def scaled(least: int, most: int, rule: str, target: float, window: int, delay: int) -> Autoscale:
    return Autoscale(least, most, rule, target, window * NANOSECOND, delay * NANOSECOND)


def plan_of(first: int, start: int, auto: Autoscale, mtbf: int, repair: int) -> FleetPlan:
    starts, runs, down = (n * NANOSECOND for n in (start, mtbf, repair))
    return FleetPlan(first, starts, auto, runs, down, 7)


def failure_of(number: int, at: int, seconds: int | None) -> Failure:
    return Failure(number, at * NANOSECOND + 1, None if seconds is None else seconds * 1009)


PLANS = st.builds(
    plan_of,
    st.integers(1, 3),
    st.integers(1, 40_001),
    st.builds(
        scaled,
        st.just(1),
        st.just(3),
        RULES,
        st.sampled_from([0.3, 1.0, 3.0]),
        st.sampled_from([5_003, 21_001]),
        st.sampled_from([5_000, 60_000]),
    ),
    st.sampled_from([0, 0, 30_011]),
    st.sampled_from([0, 10_007]),
)


# -- a simulator that goes step by step ------------------------------------------------------------


@dataclass(eq=False)
class SlowJob:
    number: int
    request: Request
    arrival: int
    cached: int = 0
    generated: int = 0
    first: int = -1
    last: int = -1

    @property
    def left(self) -> int:
        return self.request.prompt + self.generated - self.cached


@dataclass(eq=False)
class SlowReplica:
    """Sequences one by one, each step by itself. `until` is when its step ends, None without."""

    number: int
    state: str
    limits: ServerLimits
    costs: Linear
    waiting: list[SlowJob] = field(default_factory=list[SlowJob])
    running: list[SlowJob] = field(default_factory=list[SlowJob])
    parts: list[tuple[SlowJob, int]] = field(default_factory=list[tuple[SlowJob, int]])
    until: int | None = None
    due: int | None = None  # when it takes requests

    def plan(self, now: int) -> None:
        budget = self.limits.tokens
        self.parts = []
        decoding = [j for j in self.running if j.left == 1 and j.generated]
        for job in (*decoding, *(j for j in self.running if j not in decoding)):
            self.parts.append((job, min(job.left, budget)))
            budget -= self.parts[-1][1]
        while self.waiting and budget > 0 and len(self.running) < self.limits.sequences:
            job = self.waiting.pop(0)
            self.running.append(job)
            self.parts.append((job, min(job.left, budget)))
            budget -= self.parts[-1][1]
        if self.parts:
            pieces = [(new, job.cached) for job, new in self.parts]
            self.until = now + self.costs.mixed(0, 0, pieces)

    def finish(self, now: int) -> list[SlowJob]:
        self.until, done = None, list[SlowJob]()
        for job, new in self.parts:
            job.cached += new
            if job.left:
                continue
            job.generated += 1
            job.first = now if job.first < 0 else job.first
            if job.generated == job.request.output:
                job.last = now
                done.append(job)
                self.running.remove(job)
        self.parts = []
        return done


class SlowServer:
    def __init__(self, requests: Sequence[Request], plan: FleetPlan, failures: Sequence[Failure]):
        self.plan, self.failures = plan, sorted(failures, key=lambda f: f.at)
        jobs = [SlowJob(n, r, r.arrival * NANOSECOND) for n, r in enumerate(requests, 1)]
        self.coming, self.all = jobs, len(jobs)
        first = plan.first if plan.first is not None else 3
        self.each = [
            SlowReplica(n, "up" if n < first else "off", LIMITS, Linear()) for n in range(3)
        ]
        self.done: list[SlowJob] = []
        self.parked: list[SlowJob] = []
        self.held = 0
        self.load = [0.0, 0.0, 0.0]  # integrals since the last look: busy, requests, waiting
        self.wanted = [(0, first)]

    def run(self) -> None:
        auto = self.plan.autoscale
        now, tick = 0, auto.window if auto else None
        while len(self.done) < self.all:
            times = [t for r in self.each for t in (r.until, r.due) if t is not None]
            times += [self.coming[0].arrival] if self.coming else []
            times += [self.failures[0].at] if self.failures else []
            times += [tick] if tick is not None else []
            now = self.pass_time(now, min(times))
            for replica in self.each:
                if replica.due == now:
                    replica.due, replica.state = None, "up"
            self.unpark()
            while self.failures and self.failures[0].at == now:
                self.fail(self.failures.pop(0), now)
            if auto is not None and tick == now:
                self.scale(auto, now)
                tick = now + auto.window
            self.step(now)

    def step(self, now: int) -> None:
        while self.coming and self.coming[0].arrival == now:
            self.send(self.coming.pop(0))
        for replica in self.each:
            if replica.until == now:
                self.done += replica.finish(now)
        for replica in self.each:
            if replica.until is None:
                replica.plan(now)
                self.stop_if_empty(replica)

    def stop_if_empty(self, replica: SlowReplica) -> None:
        if replica.state == "draining" and not replica.running and not replica.waiting:
            replica.state = "off"

    def pass_time(self, before: int, now: int) -> int:
        span = now - before
        waiting = sum(len(r.waiting) for r in self.each) + len(self.parked)
        self.load[0] += span * sum(r.until is not None for r in self.each)
        self.load[1] += span * (waiting + sum(len(r.running) for r in self.each))
        self.load[2] += span * waiting
        self.held += span * sum(r.state != "off" for r in self.each)
        return now

    def send(self, job: SlowJob) -> None:
        up = [r for r in self.each if r.state == "up"]
        if not up:
            self.parked.append(job)
            return
        min(up, key=lambda r: (len(r.waiting) + len(r.running), r.number)).waiting.append(job)

    def unpark(self) -> None:
        jobs, self.parked = self.parked, []
        for job in jobs:
            self.send(job)

    def fail(self, failure: Failure, now: int) -> None:
        replica = self.each[failure.replica]
        if replica.state not in ("up", "draining"):
            return
        jobs = [*replica.running, *replica.waiting]
        emptied = replica.state == "draining"
        replica.state = "off" if emptied else "down"
        replica.running, replica.waiting, replica.parts, replica.until = [], [], [], None
        replica.due = None if emptied else now + (failure.seconds or self.plan.start)
        for job in jobs:
            job.cached = 0
            self.send(job)

    def scale(self, auto: Autoscale, now: int) -> None:
        load = self.load[("busy", "requests", "queue").index(auto.rule)] / auto.window
        self.load = [0.0, 0.0, 0.0]
        number = ceil(load / auto.target * (1 - 1e-9))
        self.wanted.append((now, min(auto.most, max(auto.least, number))))
        self.wanted = [(t, n) for t, n in self.wanted if t >= now - auto.delay]
        there = [r for r in self.each if r.state in ("up", "starting", "down")]
        fewest = max(n for _, n in self.wanted)
        more = self.wanted[-1][1] - len(there)
        back = [r for r in self.each if r.state == "draining"]
        off = [r for r in self.each if r.state == "off"]
        for replica in (back + off)[: max(0, more)]:
            if replica.state == "draining":
                replica.state = "up"
            else:
                replica.state, replica.due = "starting", now + self.plan.start
        states = ("starting", "down", "up")
        order = sorted(there, key=lambda r: (states.index(r.state), -r.number))
        for replica in order[: max(0, len(there) - fewest)] if more <= 0 else []:
            replica.state = "draining" if replica.state == "up" else "off"
            replica.due = None
            self.stop_if_empty(replica)
        self.unpark()


FAILURES = st.lists(
    st.builds(
        failure_of,
        st.integers(0, 2),
        st.integers(0, 200_000),
        st.one_of(st.none(), st.integers(1, 10**8)),
    ),
    max_size=3,
)


def fleet(
    requests: Sequence[Request], plan: FleetPlan, failures: Sequence[Failure] = (), **how: Any
) -> Simulation:
    return served(requests, LIMITS, count=3, plan=plan, failures=failures, **how)


@examples(100)
@given(loads(15), PLANS, FAILURES)
def test_every_event_is_that_of_the_simulator_that_steps(
    requests: list[Request], plan: FleetPlan, failures: list[Failure]
) -> None:
    still = FleetPlan(plan.first, plan.start, plan.autoscale)
    slow = SlowServer(requests, still, failures)
    slow.run()
    run = fleet(requests, still, failures)
    actual = sorted((j.number, j.first, j.last) for j in run.done)
    assert actual == sorted((j.number, j.first, j.last) for j in slow.done)
    assert run.fleet.series.totals[0] == slow.held


def test_replicas_that_return_at_one_time_share_the_requests_that_wait() -> None:
    requests = [Request(0, 2, 1) for _ in range(6)]
    plan = FleetPlan(2, NANOSECOND)
    run = fleet(requests, plan, [failure_of(1, 0, None), failure_of(0, 0, None)])
    assert [r.tally.computed for r in run.replicas] == [6, 6, 0]


# -- what holds of every server --------------------------------------------------------------------


@examples(100)
@given(loads(), PLANS, FAILURES)
def test_no_request_and_no_token_is_lost(
    requests: list[Request], plan: FleetPlan, failures: list[Failure]
) -> None:
    run = fleet(requests, plan, failures)
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    tallies = [r.tally for r in run.replicas]
    computed = sum(t.computed + t.decoded for t in tallies)
    assert computed == cached_tokens(run) + sum(t.lost for t in tallies)
    assert run.area == sum(j.last - j.arrival for j in run.done)
    waits = run.means(run.replicas)[1] + run.means(run.replicas)[2]
    parked = run.fleet.series.totals[2] / max(1, run.end)
    assert (waits + parked) * run.end == pytest.approx(run.area, rel=1e-9)
    auto = plan.autoscale
    assert auto is not None
    kept, up, _ = run.fleet.series.totals
    assert auto.least * run.end <= kept <= auto.most * run.end
    assert up <= kept


@examples(30)
@given(loads())
def test_replicas_that_nothing_happens_to_give_the_same_answer(requests: list[Request]) -> None:
    plain = served(requests, LIMITS, count=3)
    still = FleetPlan(None, 1, scaled(3, 3, "requests", 1.0, 999, 0), 10**30)
    run = fleet(requests, still)
    ends = [[(j.number, j.first, j.last) for j in r.done] for r in (plain, run)]
    assert ends[0] == ends[1]
    assert [r.tally for r in plain.replicas] == [r.tally for r in run.replicas]
    assert plain.means(plain.replicas) == run.means(run.replicas)
    assert run.fleet.series.totals == plain.fleet.series.totals == [3 * run.end, 3 * run.end, 0]


def test_the_same_seed_gives_the_same_failures() -> None:
    requests = renewal(3e4, 1.0, 300, "prompt=5..50,output=~20", 1, None, 1)
    runs = [fleet(requests, FleetPlan(mtbf=3 * 10**12, repair=10**11, seed=s)) for s in (1, 1, 2)]
    ends = [[(j.number, j.last) for j in run.done] for run in runs]
    assert ends[0] == ends[1] != ends[2]
    assert runs[0].fleet.tally.failed


def test_failures_and_repairs_have_their_means() -> None:
    mean, repair = 2 * 10**12, 10**12
    run = fleet([Request(0, 8, 2), Request(10**9, 8, 2)], FleetPlan(mtbf=mean, repair=repair))
    kept, up, _ = run.fleet.series.totals
    assert kept == 3 * run.end
    assert run.fleet.tally.failed == pytest.approx(up / mean, rel=0.15)
    assert up / kept == pytest.approx(mean / (mean + repair), rel=0.1)


def test_scaling_is_between_the_fewest_and_the_most_replicas() -> None:
    """More load than one replica has room for, and less than three: who scales waits less than one,
    and holds less than three."""
    requests = renewal(25e4, 1.0, 1500, "prompt=~20,output=~10", 1, None, 1)

    def latency(least: int, most: int) -> tuple[float, float]:
        auto = scaled(least, most, "requests", 3.0, 100_000, 1_000_000)
        run = fleet(requests, FleetPlan(least, 10**11, auto))
        return mean_latency(run), run.fleet.series.totals[0] / run.end

    (slow, one), (scaling, kept), (fast, all_) = latency(1, 1), latency(1, 3), latency(3, 3)
    assert slow > scaling > fast
    assert one == 1 < kept < 3 == all_


def test_a_longer_start_and_more_failures_wait_longer() -> None:
    requests = renewal(25e4, 1.0, 1500, "prompt=~20,output=~10", 1, None, 1)
    auto = scaled(1, 3, "queue", 1.0, 100_000, 1_000_000)
    by_start = [mean_latency(fleet(requests, FleetPlan(1, s, auto))) for s in (0, 10**12, 10**13)]
    assert by_start == sorted(set(by_start))
    by_mtbf = [
        mean_latency(fleet(requests, FleetPlan(mtbf=m, repair=10**12))) for m in (0, 10**13, 10**12)
    ]
    assert by_mtbf == sorted(set(by_mtbf))


def test_a_replica_that_stops_serves_what_it_has_and_forgets_its_prefixes() -> None:
    auto = scaled(1, 3, "requests", 4.0, 1_000, 1_000)
    burst = [Request(0, 20, 30) for _ in range(12)]
    run = fleet([*burst, Request(10**7, 8, 2)], FleetPlan(3, 10**9, auto))
    assert run.fleet.tally.stopped == 2
    assert all(j.preempted == 0 for j in run.done)
    assert {j.replica for j in run.done if j.number <= 12} == {0, 1, 2}


@examples(30)
@given(loads(12))
def test_pods_scale_by_themselves(requests: list[Request]) -> None:
    plan = FleetPlan(1, 10**9, scaled(1, 1, "queue", 1.0, 1_000, 1_000), 10**11, 10**10)
    run = disaggregated(requests, 100 * NANOSECOND, 0, plan=plan, prefill_plan=plan)
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    assert all(r.free == r.room and not r.load for r in (*run.prefills, *run.replicas))
