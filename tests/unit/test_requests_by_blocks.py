"""Requests over time beside a slow server that goes step by step and block by block: prefixes that
are shared and evicted, prompts in chunks, beside decode or alone, preempted sequences that are
computed again or swapped, and conversations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from stagec.ir_spec.strategy.scheduler import ALONE, BESIDE, SchedulerRule
from stagec.serving.policy import ServerLimits
from stagec.serving.replica import Replica
from stagec.serving.requests import HASH_BLOCK, Request
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Simulation
from tests.support import examples
from tests.unit.test_requests_over_time import NANOSECOND, Linear

PAGE = 128
PAGES = HASH_BLOCK // PAGE


@dataclass(eq=False)
class Job:
    """A request. `cached` of its tokens have keys and values, in blocks that it `shares` and in
    pages of its own; `out` tokens came out; `away` says that its pages are at the host."""

    number: int
    request: Request
    at: int
    cached: int = 0
    out: int = 0
    shares: list[int] = field(default_factory=list[int])
    away: bool = False
    preempted: int = 0
    first: int = -1
    last: int = -1

    @property
    def left(self) -> int:
        return self.request.prompt + self.out - self.cached

    @property
    def decodes(self) -> bool:
        return self.out > 0 and self.left == 1

    def pages(self, more: int = 0) -> int:
        """Pages of its own, with so many more tokens."""
        return -(-(self.cached + more) // PAGE) - PAGES * len(self.shares)


@dataclass
class Blocks:
    """A server in nanoseconds. `known` has the shared blocks, each with the jobs that use it;
    `idle` those without, the least recently used one first."""

    limits: ServerLimits
    alone: bool
    swap: int
    running: list[Job] = field(default_factory=list[Job])
    waiting: list[Job] = field(default_factory=list[Job])
    known: dict[int, int] = field(default_factory=dict[int, int])
    idle: list[int] = field(default_factory=list[int])

    def events(self, requests: list[Request]) -> list[tuple[int, int, int, int]]:
        coming = [Job(n, r, r.arrival) for n, r in enumerate(requests, 1)]
        done, now, number = list[Job](), 0, len(coming)
        while coming or self.waiting or self.running:
            if not (self.waiting or self.running):
                now = max(now, min(job.at for job in coming))
            come = sorted((j for j in coming if j.at <= now), key=lambda j: (j.at, j.number))
            self.waiting += come
            coming = [job for job in coming if job.at > now]
            took, chunks, decodes = self.plan()
            now += took
            for job in self.land(chunks, decodes, now):
                done.append(job)
                if job.request.then is not None:
                    pause, request = job.request.then
                    number += 1
                    coming.append(Job(number, request, now + pause))
        return sorted((job.at, job.first, job.last, job.preempted) for job in done)

    @property
    def free(self) -> int:
        """Pages that nobody uses now; those of idle blocks count."""
        used = sum(job.pages() for job in self.running)
        used += PAGES * (len(self.known) - len(self.idle))
        assert self.limits.blocks is not None
        return self.limits.blocks - used

    def evict(self, chunks: list[tuple[Job, int]]) -> None:
        """Evict idle blocks whose pages somebody uses, or these chunks will use."""
        taken = sum(job.pages(n) - job.pages() for job, n in chunks)
        while PAGES * len(self.idle) > self.free - taken:
            del self.known[self.idle.pop(0)]

    def split(self) -> tuple[list[tuple[Job, int]], list[Job], int]:
        """The chunks and the sequences of a step of those that run, and the tokens left."""
        decodes = [job for job in self.running if job.decodes]
        budget = self.limits.tokens - (0 if self.alone else len(decodes))
        chunks = list[tuple[Job, int]]()
        for job in self.running:
            if not job.decodes:
                chunks.append((job, min(job.left, budget)))
                budget -= chunks[-1][1]
        return [(j, n) for j, n in chunks if n], decodes, budget

    def needs(self) -> int:
        chunks, decodes, _ = self.split()
        every = [*chunks, *((job, 1) for job in decodes)]
        return sum(job.pages(n) - job.pages() for job, n in every)

    def plan(self) -> tuple[int, list[tuple[Job, int]], list[Job]]:
        took, before = 0, len(self.running)
        while self.needs() > self.free:
            job = self.running.pop()
            took += self.leave(job)
            self.waiting.insert(0, job)
        chunks, decodes, budget = self.split()
        pages = self.needs()  # of this step
        self.evict(chunks)
        while len(self.running) == before and self.waiting and budget > 0:
            job = self.waiting[0]
            if len(self.running) == self.limits.sequences:
                break
            hit = 0 if job.cached else self.match(job.request)
            blocks = list(job.request.prefix[:hit])
            cached = job.cached or HASH_BLOCK * hit
            tokens = min(job.request.prompt + job.out - cached, budget)
            woken = [b for b in blocks if b in self.idle]
            used = [b for b in blocks if b not in woken]
            if -(-(cached + tokens) // PAGE) - PAGES * len(used) > self.free - pages:
                break
            took += self.swap * job.cached if job.away else 0
            self.waiting.pop(0)
            self.idle = [b for b in self.idle if b not in woken]
            for block in blocks:
                self.known[block] += 1
            job.shares, job.cached, job.away = blocks, cached, False
            self.running.append(job)
            before += 1
            budget -= tokens
            pages += job.pages(tokens) - job.pages()
            if job.decodes:
                decodes.append(job)
            else:
                chunks.append((job, tokens))
            self.evict(chunks)
        if chunks and self.alone:
            decodes = []
        beside = len(decodes), sum(job.cached for job in decodes)
        pieces = [(n, job.cached) for job, n in chunks]
        return took + Linear().mixed(*beside, pieces) // NANOSECOND, chunks, decodes

    def match(self, request: Request) -> int:
        hit = 0
        for block in request.prefix[: (request.prompt - 1) // HASH_BLOCK]:
            if block not in self.known:
                break
            hit += 1
        return hit

    def leave(self, job: Job) -> int:
        """Take the pages of a job. Returns the time to swap them."""
        job.preempted += 1
        self.drop(job)
        if self.swap and job.decodes:  # with all tokens, also those that others share
            job.away = True
            return self.swap * job.cached
        job.cached = 0
        return 0

    def drop(self, job: Job) -> None:
        for block in reversed(job.shares):
            self.known[block] -= 1
            if not self.known[block]:
                self.idle.append(block)
        job.shares = []

    def keep(self, job: Job, tokens: int) -> None:
        """Share the whole blocks of a job that no other job has shared."""
        for block in job.request.prefix[len(job.shares) : tokens // HASH_BLOCK]:
            if block in self.known:
                break
            self.known[block] = 1
            job.shares.append(block)

    def land(self, chunks: list[tuple[Job, int]], decodes: list[Job], now: int) -> list[Job]:
        for job in decodes:
            job.cached, job.out = job.cached + 1, job.out + 1
        for job, tokens in chunks:
            job.cached += tokens
            if not job.left:
                job.out += 1
                self.keep(job, job.request.prompt)
                job.first = now if job.first < 0 else job.first
        self.evict([])
        done = [job for job in self.running if job.out == job.request.output]
        for job in done:
            job.last = now
            self.keep(job, job.request.prompt + job.request.output - 1)
            self.running.remove(job)
            self.drop(job)
        return done


@st.composite
def sessions(draw: st.DrawFn) -> list[Request]:
    """Requests whose first blocks are those of others, some with a later turn."""
    at, made = 0, list[Request]()
    for number in range(draw(st.integers(1, 9))):
        at += draw(st.integers(1, 60_000))
        shared, own = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        blocks = (*range(shared), *(100 * (number % 3 + 1) + n for n in range(own)))
        size = HASH_BLOCK * (shared + own) + draw(st.integers(2, 300))
        request = Request(at, size, draw(st.integers(1, 200)), prefix=blocks)
        if draw(st.booleans()):
            later = Request(0, size + draw(st.integers(1, 400)), draw(st.integers(1, 9)))
            then = draw(st.integers(1, 50_000)), replace(later, prefix=blocks)
            request = replace(request, then=then)
        made.append(request)
    return made


@examples(200)
@given(
    sessions(),
    st.integers(64, 1500),
    st.integers(1, 5),
    st.integers(28, 60),
    st.booleans(),
    st.sampled_from([0, 3]),
)
def test_every_event_is_that_of_the_slow_server(
    requests: list[Request], tokens: int, sequences: int, blocks: int, alone: bool, swap: int
) -> None:
    limits = ServerLimits(tokens, sequences, blocks, PAGE)
    rule = SchedulerRule(ALONE if alone else BESIDE)
    swapped = swap * NANOSECOND
    about = 0, limits, Linear()
    replica = Replica(*about, prefix_block=HASH_BLOCK, swap=swapped, scheduler=rule)
    run = Simulation(requests, [replica], ROUTERS["least-loaded"])
    run.run()
    actual = sorted(
        (j.arrival // NANOSECOND, j.first // NANOSECOND, j.last // NANOSECOND, j.preempted)
        for j in run.done
    )
    assert actual == Blocks(limits, alone, swap).events(requests)
