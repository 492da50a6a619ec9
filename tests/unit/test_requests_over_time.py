"""Requests over time: the event loop beside one that records every step, and what holds of every
server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir_spec.strategy.scheduler import ALONE, BESIDE, SchedulerRule
from stagec.serving.arrivals import renewal
from stagec.serving.fleet import Failure
from stagec.serving.policy import LiveRequest, ServerLimits
from stagec.serving.prefixes import CacheTier, CacheTiers
from stagec.serving.replica import Replica
from stagec.serving.requests import HASH_BLOCK, Request
from stagec.serving.rollouts import Rollouts
from stagec.serving.routing import ROUTERS
from stagec.serving.served import ServedRequest
from stagec.serving.simulate import Simulation
from stagec.serving.step import Step
from stagec.serving.step_times import StepLine
from stagec.serving.stepped import stepped_server
from tests.support import examples

NANOSECOND = 10**6
SECOND = 10**15
#: Tokens after which the slope of a step's time changes.
CELL = 64


@dataclass(frozen=True)
class Linear:
    """Steps of a fixed time, and so many nanoseconds for each sequence, new token and cached token;
    with `cells` the slope over cached tokens differs from cell to cell."""

    fixed: int = 1000
    sequence: int = 10
    new: int = 20
    cells: bool = False

    def decode(self, count: int, total: int) -> StepLine:
        at = self.fixed + (self.sequence + self.new) * count
        if not self.cells:
            return StepLine(at * NANOSECOND, NANOSECOND, 0, 1 << 40)
        cell = total // CELL
        at += self.cached(cell * CELL)
        return StepLine(
            at * NANOSECOND, self.slope(cell) * NANOSECOND, cell * CELL, cell * CELL + CELL
        )

    def slope(self, cell: int) -> int:
        return cell % 3 + 1 if self.cells else 1

    def cached(self, total: int) -> int:
        cell, rest = divmod(total, CELL)
        return sum(self.slope(i) * CELL for i in range(cell)) + rest * self.slope(cell)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        tokens = self.sequence * (count + len(chunks)) + self.new * (
            count + sum(n for n, _ in chunks)
        )
        return NANOSECOND * (self.fixed + tokens + self.cached(total + sum(q for _, q in chunks)))

    def of(self, step: Step) -> int:
        """Nanoseconds of a recorded step."""
        pieces = [(c.new, c.cached) for c in step.classes for _ in range(c.count)]
        return self.mixed(0, 0, pieces) // NANOSECOND


def requests_of(
    gaps: Sequence[int], prompts: Sequence[int], outputs: Sequence[int]
) -> list[Request]:
    at, actual = 0, list[Request]()
    for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
        at += gap
        actual.append(Request(at, prompt, output))
    return actual


@st.composite
def loads(draw: st.DrawFn, most: int = 25) -> list[Request]:
    number = draw(st.integers(1, most))
    lists = (
        draw(st.lists(st.integers(*bounds), min_size=number, max_size=number))
        for bounds in ((0, 20_000), (2, 60), (1, 40))
    )
    return requests_of(*lists)


def served(
    requests: Sequence[Request], limits: ServerLimits, costs: Any = None, **how: Any
) -> Simulation:
    count = how.pop("count", 1)
    costs = costs or Linear()
    each = [Replica(i, limits, costs, **how.pop(f"replica{i}", {})) for i in range(count)]
    run = Simulation(requests, each, ROUTERS[how.pop("route", "least-loaded")], **how)
    run.run()
    return run


LIMITS = st.builds(
    ServerLimits,
    tokens=st.integers(8, 64),
    sequences=st.integers(1, 8),
    blocks=st.one_of(st.none(), st.integers(25, 60)),
    block=st.just(4),
)


@examples(200)
@given(loads(), LIMITS, st.booleans())
def test_every_event_is_that_of_single_steps(
    requests: list[Request], limits: ServerLimits, cells: bool
) -> None:
    costs = Linear(cells=cells)

    def time(step: Step) -> tuple[int, int]:
        duration = costs.of(step) * NANOSECOND
        return duration, duration

    replica, single = stepped_server(requests, limits, time, 1 << 20)
    single.run()
    run = served(requests, limits, costs)
    actual, expected = (
        sorted((j.number, j.first, j.last, j.preempted) for j in each.done)
        for each in (run, single)
    )
    assert actual == expected
    assert sum(r.tally.steps for r in run.replicas) == len(replica.steps)


# -- what holds of every server --------------------------------------------------------------------

ROUTES = st.sampled_from(sorted(ROUTERS))


def cached_tokens(run: Simulation) -> int:
    return sum(j.request.prompt + j.request.output - 1 for j in run.done)


@examples(100)
@given(loads(), LIMITS, st.integers(1, 3), ROUTES)
def test_requests_and_tokens_are_conserved(
    requests: list[Request], limits: ServerLimits, count: int, route: str
) -> None:
    run = served(requests, limits, count=count, route=route)
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    tallies = [r.tally for r in run.replicas]
    computed = sum(t.computed + t.decoded + t.hits for t in tallies)
    assert computed == cached_tokens(run) + sum(t.lost for t in tallies)
    assert all(r.free == r.room and not r.load for r in run.replicas)
    assert all(j.arrival < j.first <= j.last <= run.end for j in run.done)


SCHEDULERS = st.builds(
    SchedulerRule,
    prompts=st.sampled_from([BESIDE, ALONE]),
    reserve=st.booleans(),
    poll=st.integers(1, 5),
    gather=st.integers(0, 5),
    balance=st.integers(0, 5),
)


@examples(100)
@given(loads(), LIMITS, SCHEDULERS)
def test_every_scheduler_serves_each_token_once(
    requests: list[Request], limits: ServerLimits, scheduler: SchedulerRule
) -> None:
    run = served(requests, limits, replica0={"scheduler": scheduler})
    (replica,) = run.replicas
    tally = replica.tally
    assert tally.computed + tally.decoded == cached_tokens(run) + tally.lost
    assert replica.free == replica.room
    assert not replica.load
    assert not (scheduler.reserve and tally.preempted)
    assert all(j.arrival < j.first <= j.last <= run.end for j in run.done)


class SingleSteps(Replica):
    """Chooses the requests of each step anew."""

    def _chosen(self) -> tuple[list[tuple[ServedRequest, int]], int, int]:
        chunks, delay, _ = super()._chosen()
        return chunks, delay, 1


@examples(300)
@given(loads(), LIMITS, SCHEDULERS, st.one_of(st.none(), st.integers(1, 8)))
def test_steps_of_one_choice_are_those_of_a_choice_each(
    requests: list[Request], limits: ServerLimits, rule: SchedulerRule, concurrency: int | None
) -> None:
    """A request that arrives behind the last look of the steps in flight waits for the next one."""
    runs = [
        Simulation(
            requests,
            [kind(0, limits, Linear(), scheduler=rule)],
            ROUTERS["least-loaded"],
            concurrency=concurrency,
        )
        for kind in (Replica, SingleSteps)
    ]
    for run in runs:
        run.run()
    actual, expected = ([(j.number, j.first, j.last) for j in run.done] for run in runs)
    assert sorted(actual) == sorted(expected)
    assert runs[0].replicas[0].tally.steps == runs[1].replicas[0].tally.steps


def first_tokens(*later: int, groups: int = 1, **how: Any) -> list[int]:
    """When requests have their first token, in nanoseconds: others come while the first one
    decodes, in steps of 1,000 ns and more."""
    requests = [Request(0, 8, 80), *(Request(each, 8, 4) for each in later)]
    rule, limits = SchedulerRule(**how), ServerLimits(64, 8, groups=groups)
    run = served(requests, limits, Linear(1000, 0, 0), replica0={"scheduler": rule})
    return [job.first // NANOSECOND for job in sorted(run.done, key=lambda j: j.number)]


def test_when_new_requests_are_looked_for_and_prompts_wait_for_others() -> None:
    """Step n of the first request, n = 1 its prompt, ends behind about n times 1,000 ns."""
    at_once, polled, gathered = (
        first_tokens(3500, **how)[1] // 1000 for how in ({}, {"poll": 10}, {"gather": 6})
    )
    assert at_once == 5, "it comes in step 4 and has step 5"
    assert polled == 12, "after the prompt and 10 steps"
    assert gathered == 11, "6 steps behind step 4"


def test_a_long_queue_is_not_read_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that come faster than they are served."""
    reads, left = [0], vars(LiveRequest)["left"].fget

    def counted(job: ServedRequest) -> int:
        reads[0] += 1
        return int(left(job))

    monkeypatch.setattr(LiveRequest, "left", property(counted))
    requests = [Request(0, 8, 2)] * 1000
    for gather in (0, 4):
        reads[0] = 0
        rule = SchedulerRule(gather=gather)
        run = served(requests, ServerLimits(64, 8), replica0={"scheduler": rule})
        assert len(run.done) == 1000
        assert reads[0] < 30 * len(requests)


def test_prompts_wait_until_each_group_has_one() -> None:
    """As under `enable_balance`: at most so many steps, and then for others if each has one."""

    def ends(*later: int, **how: Any) -> list[int]:
        return [each // 1000 for each in first_tokens(*later, groups=2, **how)[1:]]

    assert ends(3500, balance=30) == [35], "no second one comes: 30 steps behind step 4"
    assert ends(3500, 9500, balance=30) == [11, 11], "both in step 11, behind the second one"
    assert ends(3500, 9500, balance=30, gather=6) == [17, 17], "and 6 steps later"
    assert ends(3500, balance=30, gather=6) == [35], "who waits in vain does not gather"
    assert ends(3500, 3600, balance=30) == [5, 5]
    assert [each // 1000 for each in first_tokens(3500, balance=30)] == [1, 5], "of one group"


def test_prompts_alone_have_steps_of_their_own() -> None:
    alone = served(
        [Request(0, 8, 40), Request(3500, 8, 4)],
        ServerLimits(64, 8),
        Linear(1000, 0, 0),
        replica0={"scheduler": SchedulerRule(ALONE)},
    )
    (replica,) = alone.replicas
    assert replica.tally.steps == 41, "39 steps that decode, and two with prompts alone"


@examples(100)
@given(loads(), LIMITS, st.integers(1, 3))
def test_littles_law(requests: list[Request], limits: ServerLimits, count: int) -> None:
    run = served(requests, limits, count=count)
    assert run.area == sum(j.last - j.arrival for j in run.done)
    running, waiting = run.means(run.replicas)[1:3]
    assert (running + waiting) * run.end == pytest.approx(run.area, rel=1e-9)


@examples(100)
@given(loads(), st.integers(1, 6))
def test_an_open_loop_with_the_arrivals_of_a_closed_one_is_the_same(
    requests: list[Request], concurrency: int
) -> None:
    limits = ServerLimits(64, 8, 60, 4)
    closed = served(requests, limits, concurrency=concurrency)
    jobs = sorted(closed.done, key=lambda j: j.number)
    arrivals = [replace(j.request, arrival=j.arrival // NANOSECOND) for j in jobs]
    opened = served(arrivals, limits)
    actual, expected = (
        sorted((j.number, j.arrival, j.first, j.last) for j in run.done) for run in (opened, closed)
    )
    assert actual == expected


def test_the_next_turn_waits_for_hosts() -> None:
    turn = Request(0, 30, 4)
    talk = replace(turn, then=(7, replace(turn, then=(5, turn))))
    limits, outside = ServerLimits(64, 8, 60, 4), 3 * NANOSECOND
    plain, hosts = (served([talk], limits, outside=each).done for each in (0, outside))
    assert [j.last - i.last for i, j in zip(plain, hosts, strict=True)] == [0, outside, 2 * outside]
    assert hosts[1].arrival == hosts[0].last + outside + 7 * NANOSECOND


def mean_latency(run: Simulation) -> float:
    return sum(j.last - j.arrival for j in run.done) / len(run.done)


@pytest.mark.long
def test_more_load_waits_longer_and_more_replicas_shorter() -> None:
    limits = ServerLimits(256, 16, 800, 16)
    lengths = "prompt=lognormal:100:1.0,output=~30"

    def latency(rate: float, count: int) -> float:
        requests = renewal(rate, 1.0, 2000, lengths, 1, None, 1)
        return mean_latency(served(requests, limits, count=count))

    by_rate = [latency(rate, 2) for rate in (5e3, 2e4, 4e4, 8e4, 16e4)]
    assert by_rate == sorted(by_rate)
    by_count = [latency(8e4, count) for count in (1, 2, 4, 8)]
    assert by_count == sorted(by_count, reverse=True)


def test_bursts_wait_longer() -> None:
    limits, lengths = ServerLimits(256, 16, 800, 16), "prompt=100,output=30"
    shapes = (4.0, 1.0, 0.25)
    actual = [
        mean_latency(served(renewal(3e4, s, 2000, lengths, 1, None, 1), limits)) for s in shapes
    ]
    assert actual == sorted(actual)


def test_the_same_seed_gives_the_same_answer() -> None:
    limits = ServerLimits(64, 8, 200, 4)
    lengths = "prompt=5..50,output=~20"
    runs = [served(renewal(1e4, 0.5, 200, lengths, s, None, 1), limits, count=2) for s in (3, 3, 4)]
    ends = [[(j.number, j.last) for j in run.done] for run in runs]
    assert ends[0] == ends[1] != ends[2]


# -- prefixes, swaps, pods, failures ---------------------------------------------------------------


def alike(number: int, gap: int, shared: int, own: int, output: int = 4) -> list[Request]:
    """Requests whose first blocks are the same ones."""
    size = HASH_BLOCK * (shared + own) + 10
    return [
        Request(
            i * gap,
            size,
            output,
            prefix=(*range(shared), *(1000 * (i + 1) + n for n in range(own))),
        )
        for i in range(number)
    ]


def test_a_prefix_is_computed_once() -> None:
    limits = ServerLimits(8192, 8, 4096, 16)
    requests = alike(5, 10**9, shared=3, own=2)
    run = served(requests, limits, replica0={"prefix_block": HASH_BLOCK})
    tally = run.replicas[0].tally
    assert tally.hits == 4 * 3 * HASH_BLOCK
    assert tally.computed + tally.hits == sum(r.prompt for r in requests)
    firsts = [j.first - j.arrival for j in run.done]
    assert firsts[1] < firsts[0]
    assert len(set(firsts[1:])) == 1
    cold = served(requests, limits)
    assert cold.done[1].first - cold.done[1].arrival == firsts[0]


def test_prefixes_give_way_to_requests() -> None:
    pages = (5 * HASH_BLOCK + 16) // 16
    limits = ServerLimits(8192, 8, pages, 16)  # room for one request, none for two prefixes
    one, other = alike(1, 0, 3, 2)[0], Request(10**9, 5 * HASH_BLOCK, 4)
    again = replace(one, arrival=2 * 10**9)
    run = served([one, other, again], limits, replica0={"prefix_block": HASH_BLOCK})
    assert run.replicas[0].tally.hits == 0
    run = served([one, again], limits, replica0={"prefix_block": HASH_BLOCK})
    assert run.replicas[0].tally.hits == 5 * HASH_BLOCK


#: Of requests that begin alike: the time since the one before, blocks of all of them, and its own.
SHARES = st.lists(
    st.tuples(st.integers(0, 30_000), st.integers(0, 4), st.integers(1, 3)), min_size=1
)


def that_share(each: Sequence[tuple[int, int, int]]) -> list[Request]:
    """The requests of `SHARES`."""
    at, requests = 0, list[Request]()
    for number, (gap, shared, own) in enumerate(each):
        at += gap
        request = alike(1, 0, shared, own)[0]
        blocks = (*range(shared), *(100 * (number + 1) + n for n in range(own)))
        requests.append(replace(request, arrival=at, prefix=blocks))
    return requests


@examples(50)
@given(SHARES)
def test_pages_of_prefixes_are_conserved(each: list[tuple[int, int, int]]) -> None:
    requests = that_share(each)
    limits = ServerLimits(700, 4, 300, 16)
    run = served(requests, limits, replica0={"prefix_block": HASH_BLOCK})
    replica = run.replicas[0]
    tally = replica.tally
    assert replica.free == replica.room
    assert tally.computed + tally.decoded + tally.hits == cached_tokens(run) + tally.lost


def test_prefix_aware_routing_goes_where_the_prefix_is() -> None:
    limits, cache = ServerLimits(8192, 8, 4096, 16), {"prefix_block": HASH_BLOCK}
    first, second = alike(1, 0, 3, 0)[0], replace(alike(1, 0, 3, 0)[0], prefix=(7, 8, 9))
    requests = [replace((first, second)[i in (1, 2)], arrival=i * 10**9) for i in range(4)]
    how: dict[str, Any] = {"count": 2, "replica0": cache, "replica1": cache}
    hits = {
        route: sum(r.tally.hits for r in served(requests, limits, route=route, **how).replicas)
        for route in ("round-robin", "prefix-aware")
    }
    assert hits == {"round-robin": 0, "prefix-aware": 2 * 3 * HASH_BLOCK}


def test_swapping_computes_nothing_again() -> None:
    limits = ServerLimits(64, 8, 30, 4)
    requests = [Request(0, 30, 40) for _ in range(4)]
    again, swapped = (served(requests, limits, replica0={"swap": s}) for s in (0, NANOSECOND))
    assert again.replicas[0].tally.lost
    assert again.replicas[0].tally.preempted
    assert not swapped.replicas[0].tally.lost
    assert swapped.replicas[0].tally.swapped
    slow = served(requests, limits, replica0={"swap": 1000 * NANOSECOND})
    assert slow.end > swapped.end


def disaggregated(requests: Sequence[Request], busy: int, rest: int, **how: Any) -> Simulation:
    limits, costs = ServerLimits(64, 8, 200, 4), Linear()
    first, second = Replica(0, limits, costs, prefills=True), Replica(1, limits, costs)
    route = ROUTERS["least-loaded"]
    run = Simulation(
        requests, [second], route, [first], lambda tokens: (busy * tokens, rest), **how
    )
    run.run()
    return run


def test_caches_are_handed_over_before_a_request_decodes() -> None:
    requests = [Request(0, 30, 5), Request(10**7, 20, 1)]
    run = disaggregated(requests, 0, 500 * NANOSECOND)
    costs = Linear()
    first = costs.mixed(0, 0, [(30, 0)]) + 500 * NANOSECOND
    (one, two) = sorted(run.done, key=lambda j: j.number)
    assert one.first == first
    assert one.last == first + sum(costs.decode(1, c).time(c) for c in range(30, 34))
    assert two.last == two.first == 10**7 * NANOSECOND + costs.mixed(0, 0, [(20, 0)])
    assert [r.tally.computed for r in (*run.prefills, *run.replicas)] == [50, 0]


def test_a_link_sends_one_prompt_after_the_other() -> None:
    requests = [Request(0, 30, 2), Request(0, 30, 2)]
    run = disaggregated(requests, 10**4 * NANOSECOND, 0)
    firsts = sorted(j.first for j in run.done)
    assert firsts[1] - firsts[0] == 30 * 10**4 * NANOSECOND


@examples(50)
@given(loads(12), st.integers(0, 30_000), st.integers(1, 50_000), st.integers(0, 1))
def test_a_failure_loses_caches_and_no_requests(
    requests: list[Request], at: int, seconds: int, replica: int
) -> None:
    limits = ServerLimits(64, 8, 60, 4)
    failure = Failure(replica, at * NANOSECOND, seconds * NANOSECOND)
    run = served(requests, limits, count=2, failures=[failure])
    assert len(run.done) == len(requests)
    tallies = [r.tally for r in run.replicas]
    assert all(r.free == r.room for r in run.replicas)
    lost_chunks = sum(t.computed + t.decoded for t in tallies) - cached_tokens(run)
    assert lost_chunks == sum(t.lost for t in tallies)
    assert run.area == sum(j.last - j.arrival for j in run.done)


@examples(50)
@given(loads(12), st.integers(0, 60_000), st.integers(1, 50_000), st.integers(0, 1))
def test_failures_of_pods_lose_no_requests(
    requests: list[Request], at: int, seconds: int, replica: int
) -> None:
    failure = Failure(replica, at * NANOSECOND, seconds * NANOSECOND)
    run = disaggregated(requests, 100 * NANOSECOND, 0, failures=[failure])
    assert sorted(j.number for j in run.done) == list(range(1, len(requests) + 1))
    assert all(r.free == r.room and not r.load for r in (*run.prefills, *run.replicas))


def test_a_rollout_stops_with_what_is_done() -> None:
    requests = [Request(0, 10, n) for n in (5, 10, 200)]
    whole = served(requests, ServerLimits(64, 8), rollouts=Rollouts(3, 3))
    part = served(requests, ServerLimits(64, 8), rollouts=Rollouts(3, 2))
    assert len(part.done) == 2
    assert part.end == max(j.last for j in part.done) < whole.end
    assert part.kept_tokens() == 10
    assert not whole.kept_tokens()


def _rollouts(count: int, left: int, *times: int) -> Rollouts:
    iterations, ahead, train, update = times
    return Rollouts(count, max(1, count - left), iterations, ahead, train, update)


ROLLOUTS = st.builds(
    _rollouts,
    st.integers(1, 8),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 60_000).map(NANOSECOND.__mul__),
    st.integers(0, 9_000).map(NANOSECOND.__mul__),
)


@examples(100)
@given(loads(40), ROLLOUTS, LIMITS, st.integers(1, 3), st.booleans())
def test_rollouts_follow_each_other(
    requests: list[Request], rollouts: Rollouts, limits: ServerLimits, count: int, pods: bool
) -> None:
    requests = [requests[i % len(requests)] for i in range(rollouts.requests)]
    if pods:
        run = disaggregated(requests, 100 * NANOSECOND, 0, rollouts=rollouts)
    else:
        run = served(requests, limits, count=count, rollouts=rollouts)
    batches = rollouts.batches
    assert len(batches) == rollouts.iterations
    trained = begins = version = 0
    for number, batch in enumerate(batches):
        assert (batch.begin, batch.version) == (begins, version)
        assert batch.carried <= rollouts.count - rollouts.quota
        assert batch.stale <= batch.oldest <= number
        trained = max(batch.end, trained) + rollouts.train
        assert batch.trained == trained
        before = number - rollouts.ahead
        begins = max(batch.end, batches[before].trained if before >= 0 else 0)
        if (new := sum(b.trained <= begins for b in batches[: number + 1])) > version:
            begins, version = begins + rollouts.update, new
    assert run.end == batches[-1].end
    done = run.done[: rollouts.quota * rollouts.iterations]
    assert sum(b.tokens for b in batches) == sum(j.request.output for j in done)
    if rollouts.quota == rollouts.count:  # no weights change within a request
        assert all(b.oldest <= rollouts.ahead for b in batches)
        tallies = [r.tally for r in (*run.prefills, *run.replicas)]
        lost = sum(t.lost for t in tallies)
        assert sum(t.computed + t.decoded for t in tallies) - cached_tokens(run) == lost


def test_a_request_that_is_carried_over_keeps_its_tokens_and_is_computed_again() -> None:
    requests = [Request(0, 10, n) for n in (5, 30, 5)]
    rollouts = Rollouts(2, 1, 2, 0, 10**6 * NANOSECOND, 10**5 * NANOSECOND)
    run = served(requests, ServerLimits(64, 8), rollouts=rollouts)
    one, two = rollouts.batches
    assert two.begin == one.end + 1_100_000 * NANOSECOND
    assert (one.carried, two.carried) == (0, 1)
    assert run.replicas[0].tally.lost == 10 + 5 - 1
    assert run.replicas[0].tally.computed == 10 + 10 + 10 + (10 + 5)
    assert (one.tokens, one.oldest, two.tokens, two.oldest) == (5, 0, 5, 0)
    longer = Rollouts(2, 1, 3, 0, 10**6 * NANOSECOND)
    served([*requests, Request(0, 10, 60)], ServerLimits(64, 8), rollouts=longer)
    last = longer.batches[-1]  # 5 tokens of each of the weights before, of 30
    assert (last.tokens, last.oldest) == (30, 2)
    assert last.stale == (5 * 2 + 5 * 1) / 30


def test_turns_of_a_conversation_are_one_rollout_and_wait_for_weights() -> None:
    second = Request(0, 30, 5)
    first = Request(0, 10, 5, then=(20_000, second))
    rollouts = Rollouts(2, 1, 2, 0, 10**6 * NANOSECOND)
    run = served(
        [first, Request(0, 10, 5), Request(0, 10, 500)], ServerLimits(64, 8), rollouts=rollouts
    )
    one, two = rollouts.batches
    assert (one.tokens, two.tokens, two.carried) == (5, 10, 1)
    assert (two.stale, two.oldest) == (0.5, 1)
    assert min(j.first for j in run.done if j.request is second) > two.begin


# -- tiers below the prefix cache ------------------------------------------------------------------

LOAD = 3 * 10**11  # of a block: 300 us


def with_tiers(*blocks: int, blocking: bool = False) -> dict[str, Any]:
    """A replica with a host, and a disk at half its speed, of so many blocks."""
    named = zip(("host", "disk"), blocks, strict=False)
    tiers = [CacheTier(name, count, LOAD * n) for n, (name, count) in enumerate(named, 1)]
    return {"prefix_block": HASH_BLOCK, "tiers": CacheTiers(tiers, blocking)}


def pushed_out() -> tuple[list[Request], ServerLimits]:
    """A request, one that takes its room, and the first one again."""
    one, other = alike(1, 0, 3, 2)[0], Request(10**9, 5 * HASH_BLOCK, 4)
    pages = (5 * HASH_BLOCK + 16) // 16
    return [one, other, replace(one, arrival=2 * 10**9)], ServerLimits(8192, 8, pages, 16)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("blocks", "times"), [((5,), 5), ((0, 5), 10), ((3, 2), 7)])
def test_blocks_come_back_at_the_speed_of_their_tier(
    blocks: tuple[int, ...], times: int, blocking: bool
) -> None:
    """TTFT is the loads of the five blocks, and a step of the ten tokens that are left."""
    requests, limits = pushed_out()
    run = served(requests, limits, replica0=with_tiers(*blocks, blocking=blocking))
    tally, (*_, again) = run.replicas[0].tally, run.done
    assert tally.loaded.total() == tally.hits == again.hit == 5 * HASH_BLOCK
    assert again.first - again.arrival == times * LOAD + Linear().mixed(0, 0, [(10, tally.hits)])
    assert tally.computed == sum(r.prompt for r in requests) - tally.hits


def test_what_no_tier_has_is_computed() -> None:
    """A host with room for two blocks has those of the prefix that gave up their room last."""
    requests, limits = pushed_out()
    run = served(requests, limits, replica0=with_tiers(2))
    assert run.replicas[0].tally.loaded == {"host": 2 * HASH_BLOCK}
    assert not served(requests, limits, replica0=with_tiers(0)).replicas[0].tally.hits


def test_others_decode_while_a_request_waits_for_its_blocks() -> None:
    requests, limits = pushed_out()
    limits = replace(limits, blocks=(limits.blocks or 0) + 4)  # one page more than one needs
    beside = Request(requests[2].arrival - 1000, 8, 32)
    every = [*requests[:2], beside, requests[2]]
    apart = served(every[:3], limits, replica0=with_tiers(5)).done[-1]
    for blocking, waits in ((False, 0), (True, 5 * LOAD)):
        run = served(every, limits, replica0=with_tiers(5, blocking=blocking))
        (other,) = (job for job in run.done if job.request is beside)
        again = run.done[-1] if run.done[-1] is not other else run.done[-2]
        step = Linear().mixed(0, 0, [(10, 5 * HASH_BLOCK)])
        if blocking:
            assert other.last - apart.last > waits
        else:
            assert other.last == apart.last
        assert again.first - again.arrival >= 5 * LOAD + step


@examples(50)
@given(
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 4), st.integers(1, 3)), min_size=1),
    st.integers(0, 12),
    st.integers(0, 12),
    st.booleans(),
)
def test_tiers_lose_no_token(
    each: list[tuple[int, int, int]], host: int, disk: int, blocking: bool
) -> None:
    """Tokens are computed or loaded once, pages come back, and no tier has more than its room."""
    at, requests = 0, list[Request]()
    for number, (gap, shared, own) in enumerate(each):
        at += gap
        blocks = (*range(shared), *(100 * (number % 3 + 1) + n for n in range(own)))
        requests.append(replace(alike(1, 0, shared, own)[0], arrival=at, prefix=blocks))
    how = with_tiers(host, disk, blocking=blocking)
    failures = [Failure(0, at * NANOSECOND // 2, 0)]
    for run in (
        served(requests, ServerLimits(700, 4, 300, 16), replica0=how),
        served(requests, ServerLimits(700, 4, 300, 16), replica0=how, failures=failures),
    ):
        (replica,) = run.replicas
        tally = replica.tally
        assert len(run.done) == len(requests)
        assert replica.free == replica.room
        assert tally.computed + tally.decoded + tally.hits == cached_tokens(run) + tally.lost
        assert tally.loaded.total() <= tally.hits
        assert all(len(t.stored) <= t.blocks for t in how["tiers"].tiers)
