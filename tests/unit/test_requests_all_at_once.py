"""Requests over time with everything that a server may have at once: pods, pipeline stages, prefix
caches with tiers, swaps, conversations, open and closed loops, replicas that scale and fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.serving.adapters import AdapterSlots
from stagec.serving.fleet import Autoscale, Failure, FleetPlan
from stagec.serving.pipelined import PipelinedReplica
from stagec.serving.policy import ServerLimits
from stagec.serving.prefixes import CacheTier, CacheTiers
from stagec.serving.replica import Replica
from stagec.serving.requests import HASH_BLOCK, Request, turns
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Simulation
from tests.support import examples
from tests.unit.test_requests_on_stages import SCHEDULERS, Stages
from tests.unit.test_requests_over_time import NANOSECOND, Linear, cached_tokens

PAGE = 16


@dataclass(frozen=True)
class Server:
    """What a server is made of: replicas of so many stages, and as many again that prefill."""

    stages: int
    replicas: int
    prefills: int
    scheduler: SchedulerRule
    swap: int
    tiers: tuple[int, int, bool] | None  # blocks of host and disk, and whether steps wait
    plan: FleetPlan
    failures: Sequence[Failure]
    route: str
    link: tuple[int, int]
    adapters: tuple[int, int] | None = None  # slots, and the time of a load
    pages: int = 120
    single: bool = False  # each step is an event, also of one stage

    def run(self, requests: Sequence[Request], concurrency: int | None = None) -> Simulation:
        """Serve requests."""
        numbers = range(self.prefills + self.replicas)
        each = [self._replica(n, first=n < self.prefills) for n in numbers]
        busy, rest = self.link
        run = Simulation(
            requests,
            each[self.prefills :],
            ROUTERS[self.route],
            each[: self.prefills],
            (lambda tokens: (busy * tokens, rest)) if self.prefills else None,
            concurrency,
            [f for f in self.failures if f.replica < len(each)],
            self._plan(self.replicas),
            self._plan(self.prefills),
        )
        run.run()
        return run

    def _plan(self, most: int) -> FleetPlan:
        auto = self.plan.autoscale
        if auto is None or not most:
            return replace(self.plan, first=None, autoscale=None)
        return replace(self.plan, first=min(most, 1), autoscale=replace(auto, most=most))

    def _replica(self, number: int, *, first: bool) -> Replica:
        how: dict[str, Any] = {"scheduler": self.scheduler, "prefills": first}
        how |= {"prefix_block": HASH_BLOCK, "tiers": self.tiers and _tiers(*self.tiers)}
        how["swap"] = 0 if first else self.swap
        how["adapters"] = self.adapters and AdapterSlots(*self.adapters)
        limits = ServerLimits(700, 4, self.pages, PAGE)
        if self.stages == 1 and not self.single:
            return Replica(number, limits, Linear(), **how)
        costs = Stages(self.stages)
        return PipelinedReplica(number, limits, costs, pace=Linear(), stages=self.stages, **how)


@st.composite
def conversations(draw: st.DrawFn, most: int = 10) -> list[Request]:
    """Requests whose first blocks are those of others, some with a later turn that begins with all
    of the first one."""
    at, made = 0, list[Request]()
    for number in range(draw(st.integers(1, most))):
        at += draw(st.integers(0, 2_000_000))
        shared, own = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        blocks = (*range(shared), *(100 * (number % 3 + 1) + n for n in range(own)))
        size = HASH_BLOCK * (shared + own) + draw(st.integers(2, 40))
        request = Request(at, size, draw(st.integers(1, 12)), prefix=blocks)
        if draw(st.booleans()):
            later = Request(0, size + 20, 3, prefix=blocks)
            request = replace(request, then=(draw(st.integers(0, 50_000)), later))
        name = draw(st.sampled_from(["", "a", "b", "c"]))
        made.append(request.with_adapter(name) if name else request)
    return made


def _autoscale(rule: str, target: float, window: int, delay: int) -> Autoscale:
    return Autoscale(1, 1, rule, target, window * NANOSECOND, delay * NANOSECOND)


def _tiers(host: int, disk: int, blocking: bool) -> CacheTiers:
    tiers = [CacheTier("host", host, 3 * 10**11), CacheTier("disk", disk, 6 * 10**11)]
    return CacheTiers(tiers, blocking)


PLANS = st.builds(
    FleetPlan,
    first=st.none(),
    start=st.integers(1, 10**6).map(NANOSECOND.__mul__),
    autoscale=st.one_of(
        st.none(),
        st.builds(
            _autoscale,
            st.sampled_from(["requests", "queue", "busy", "cache"]),
            st.sampled_from([0.3, 1.0, 3.0]),
            st.sampled_from([50_003, 500_001]),
            st.sampled_from([50_000, 10**6]),
        ),
    ),
    mtbf=st.sampled_from([0, 0, 10**13]),
    repair=st.sampled_from([0, 10**11]),
    seed=st.integers(0, 99),
)
FAILURES = st.lists(
    st.builds(
        Failure,
        st.integers(0, 3),
        st.integers(1, 5 * 10**6).map(NANOSECOND.__mul__),
        st.one_of(st.none(), st.integers(1, 10**12)),
    ),
    max_size=3,
)
SERVERS = st.builds(
    Server,
    stages=st.integers(1, 3),
    replicas=st.integers(1, 2),
    prefills=st.integers(0, 2),
    scheduler=SCHEDULERS,
    swap=st.sampled_from([0, 1000 * NANOSECOND]),
    tiers=st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans())),
    plan=PLANS,
    failures=FAILURES,
    route=st.sampled_from(sorted(ROUTERS)),
    link=st.tuples(st.integers(0, 10**9), st.integers(0, 10**11)),
    adapters=st.tuples(st.integers(1, 3), st.integers(0, 10**12)),
)


def events(run: Simulation) -> list[tuple[int, int, int, int]]:
    return sorted((j.number, j.arrival, j.first, j.last) for j in run.done)


@examples(150)
@given(conversations(), SERVERS, st.one_of(st.none(), st.integers(1, 4)))
def test_requests_tokens_pages_and_time_are_conserved(
    requests: list[Request], server: Server, concurrency: int | None
) -> None:
    run = server.run(requests, concurrency)
    every = [*run.prefills, *run.replicas]
    assert len({j.number for j in run.done}) == len(run.done) == len(list(turns(requests)))
    assert all(r.free == r.room and not r.load for r in every)
    assert all(j.arrival < j.first <= j.last <= run.end for j in run.done)
    tallies = [r.tally for r in every]
    computed = sum(t.computed + t.decoded + t.hits for t in tallies)
    assert computed == cached_tokens(run) + sum(t.lost for t in tallies)
    for replica in every:
        assert replica.tally.loaded.total() <= replica.tally.hits
        assert replica.adapters is not None
        assert not any(replica.adapters.users.values())
        assert len(replica.adapters.users) <= replica.adapters.slots
    # Little's law, of all replicas and those that wait for one
    assert run.area == sum(j.last - j.arrival for j in run.done)
    fleets = [run.fleet, *([run.prefill_fleet] if run.prefills else [])]
    parked = sum(fleet.series.totals[2] for fleet in fleets)
    running, waiting = run.means(every)[1:3]
    assert (running + waiting) * run.end + parked == pytest.approx(run.area, rel=1e-9)
    for fleet in fleets:
        held, up, _ = fleet.series.totals
        assert up <= held <= len(fleet.replicas) * run.end


@examples(100)
@given(conversations(), SERVERS, st.integers(1, 4))
def test_an_open_loop_with_the_arrivals_of_a_closed_one_is_the_same(
    requests: list[Request], server: Server, concurrency: int
) -> None:
    """Whatever the server has, it sees arrivals and nothing of who decided on them."""
    alone = [replace(request, then=None) for request in requests]
    closed = server.run(alone, concurrency)
    jobs = sorted(closed.done, key=lambda j: j.number)
    if any(job.arrival % NANOSECOND for job in jobs):
        return  # an arrival of a file is whole nanoseconds
    arrivals = [replace(j.request, arrival=j.arrival // NANOSECOND) for j in jobs]
    assert events(server.run(arrivals)) == events(closed)


@examples(50)
@given(conversations(), SERVERS)
def test_the_same_server_gives_the_same_answer(requests: list[Request], server: Server) -> None:
    first, again = (server.run(requests) for _ in range(2))
    assert events(first) == events(again)
    assert first.means(first.replicas) == again.means(again.replicas)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("prefills", [0, 2])
def test_more_load_waits_longer_and_more_devices_shorter(stages: int, prefills: int) -> None:
    """Mean latency rises with the rate, and falls with replicas of each kind and with faster
    steps."""
    rule, still = SchedulerRule(), FleetPlan()
    base = Server(stages, 2, prefills, rule, 0, (6, 6, False), still, (), "round-robin", (0, 0))

    def latency(gap: int, **more: Any) -> float:
        blocks = chain.from_iterable([(n % 5,), ()] for n in range(100))
        requests = [
            Request(gap * n, HASH_BLOCK * len(prefix) + 30, 8 + n % 5, prefix=prefix)
            for n, prefix in enumerate(blocks)
        ]
        run = replace(base, **more).run(requests)
        return sum(j.last - j.arrival for j in run.done) / len(run.done)

    by_rate = [latency(gap) for gap in (200_000, 20_000, 8_000, 2_000, 0)]
    assert by_rate == sorted(by_rate)
    by_count = [latency(2_000, replicas=n) for n in (1, 2, 4)]
    assert by_count == sorted(by_count, reverse=True)
    if prefills:
        by_count = [latency(2_000, prefills=n) for n in (1, 2, 4)]
        assert by_count == sorted(by_count, reverse=True)


@examples(150)
@given(conversations(), SERVERS, st.one_of(st.none(), st.integers(1, 4)))
def test_decode_steps_of_one_event_are_single_steps(
    requests: list[Request], server: Server, concurrency: int | None
) -> None:
    """A replica that adds up decode steps, and one of a single pipeline stage, which takes them one
    by one, give all requests the same times and count the same. (No engine both polls and
    gathers.)"""
    rule = server.scheduler
    server = replace(
        server, stages=1, scheduler=replace(rule, gather=rule.gather * (rule.poll < 2))
    )
    runs = [each.run(requests, concurrency) for each in (server, replace(server, single=True))]
    assert events(runs[0]) == events(runs[1])
    tallies = [[r.tally for r in (*run.prefills, *run.replicas)] for run in runs]
    for one, other in zip(*tallies, strict=True):
        assert one == other
