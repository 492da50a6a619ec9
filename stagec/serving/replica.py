"""A replica of a server over time: which requests run, and when its next step ends.

Batching follows the policy `fcfs` (`stagec.serving.policy`), with the rules of `stg.scheduler` for
prompts and admission. A step takes time that does not depend on the number of sequences: all
sequences that decode grow by a token a step, so `Batch` keeps only their number, the sum of their
contexts, the step at which each ends, and how many begin a page in each step.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import ClassVar

from stagec.ir_spec.strategy.scheduler import ALONE, SchedulerRule
from stagec.serving.adapters import AdapterSlots
from stagec.serving.batch import Batch
from stagec.serving.policy import LiveRequest, ServerLimits
from stagec.serving.prefixes import CacheTier, CacheTiers, PrefixCache
from stagec.serving.served import ServedRequest, StepsUnderWay, Tally
from stagec.serving.step_times import StepCosts

#: More than any number of steps or pages.
_ENDLESS = 1 << 62
#: More than the replicas of a server, so that their stamps differ.
_STAMPS = 1 << 20


class Replica:
    """One replica.

    `swap` is the time, in femtoseconds, to move a token's keys and values to or from the host; with
    0 a preempted sequence is computed again. A replica that only `prefills` hands each request over
    when its prompt is computed. `tiers` store blocks of prompts evicted from the device.
    `scheduler` says whether prompts have steps of their own, and when requests are admitted;
    `limits` bounds the tokens of a step. `adapters` are slots for the adapters of requests.
    """

    _batched: ClassVar[bool] = True  # all sequences that decode have a token in each step

    def __init__(
        self,
        number: int,
        limits: ServerLimits,
        costs: StepCosts,
        *,
        prefix_block: int = 0,
        tiers: CacheTiers | None = None,
        swap: int = 0,
        prefills: bool = False,
        scheduler: SchedulerRule | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.adapters = adapters
        self.scheduler = scheduler or SchedulerRule()
        self.alone = self.scheduler.prompts == ALONE
        self.number, self.limits, self.costs = number, limits, costs
        self.swap, self.prefills = swap, prefills
        self.free: int = limits.blocks if limits.blocks is not None else _ENDLESS
        self.room = self.free
        self.waiting: deque[ServedRequest] = deque()
        self.running = 0
        pages = prefix_block // limits.block
        self.prefixes = PrefixCache(pages, tiers) if prefix_block else None
        self.prefix_block, self.tiers = prefix_block, tiers
        self._link = self._now = 0  # the end of all loads of blocks; the time of the last plan
        self.tally = Tally()
        self.lacks: bool | None = None  # whether another group has no prompts; None: one queue
        self.version = 0  # of the steps in flight: events of other versions are void
        self.stamp = 0  # how often it failed
        self.way: StepsUnderWay | None = None
        self._batch = Batch.of(limits.block)
        self._partial: dict[ServedRequest, None] = {}  # running jobs whose prompts are incomplete
        self._chunk_tokens = limits.chunk or limits.tokens
        self._stamp = number
        self._reserved = 0  # pages that running jobs will have at their ends
        self._unseen = 0  # the last requests of the queue, which arrived since the last poll

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return self.running + len(self.waiting)

    @property
    def used(self) -> int:
        """Pages of the cache that requests use."""
        return self.room - self.free

    @property
    def _left(self) -> int:
        """Free pages that steps under way do not take."""
        return self.free

    # -- the next steps ----------------------------------------------------------------------------

    def plan(self, now: int) -> StepsUnderWay | None:
        """Begin the next steps; None if there is nothing to do before `wakes`."""
        self._now = now
        chunks, delay, most = self._chosen()
        if not self._batch.decoding and not chunks:
            return None
        self.way = self._under_way(now, delay, chunks, most)
        if (loaded := self.wakes) is not None:
            self.cut(loaded)
        return self.way

    def _chosen(self) -> tuple[list[tuple[ServedRequest, int]], int, int]:
        """Choose the requests of the next step. Returns its chunks of prompts, the time for which
        it waits, and the number of steps for which the choice holds."""
        batch = self._batch
        if not batch.decoding:
            batch.polled, self._unseen = batch.steps, 0
        chunks: list[tuple[ServedRequest, int]] = []
        before = self.tally.preempted
        delay = self._make_room()
        budget = self._budget
        for job, tokens in self._rest():
            budget -= self._take(job, tokens, chunks)
        gave_up = self.tally.preempted > before
        delayed = self._delayed_steps()
        if self.waiting and not gave_up and not delayed:
            delay += self._admit(budget, chunks)
        if gave_up or delay:
            return chunks, delay, 1
        until_poll = batch.polled + self.scheduler.poll - batch.steps
        return chunks, 0, min(delayed or _ENDLESS, until_poll if self._unseen else _ENDLESS)

    @property
    def wakes(self) -> int | None:
        """When the next load of blocks ends that a request waits for; None without such loads."""
        if self.tiers is None or self.tiers.blocking:
            return None
        return min((job.ready for job in self._partial if job.ready > self._now), default=None)

    @property
    def _budget(self) -> int:
        """The most tokens of chunks in the next step."""
        return self.limits.tokens - (0 if self.alone else self._batch.decoding)

    def _rest(self) -> list[tuple[ServedRequest, int]]:
        """The next chunks of incomplete prompts, in order of admission."""
        budget, rest = self._budget, list[tuple[ServedRequest, int]]()
        for job in self._partial:
            if job.ready > self._now:
                continue
            rest.append((job, min(job.left, budget, self._chunk_tokens)))
            budget -= rest[-1][1]
        return rest

    def receive(self, job: ServedRequest) -> None:
        """Add a request to the queue."""
        self.waiting.append(job)
        self._unseen += self.scheduler.poll > 1

    def looks(self, now: int) -> bool:
        """Cut the steps in flight, if they only decode, to where a request that has just arrived
        may be admitted. Returns whether they end sooner than before."""
        rule = self.scheduler
        if rule.poll > 1 and self.way is not None:
            self._batch.arrive(self.way.done(now), rule.poll)
        overtakes = rule.gather or rule.balance or self.adapters  # or goes with those before it
        if not self._has_place() or (len(self.waiting) > 1 and not overtakes):
            return False  # the first request of the queue has cut them
        return self.cut(now)

    def _has_place(self) -> bool:
        """Whether one more sequence may run."""
        return self.running < self.limits.sequences

    def _delayed_steps(self) -> int:
        """The number of decode steps for which prompts still wait for further requests."""
        batch, rule, seen = self._batch, self.scheduler, 0
        if rule.gather or rule.balance:
            seen = sum(1 for _ in islice(self._eligible(), self.limits.groups))
        if not (seen and batch.decoding and self._has_place()) or self._partial:
            batch.delays = False
            return 0
        fewer = seen < self.limits.groups if self.lacks is None else self.lacks
        lacks = rule.balance > 0 and fewer
        since, lacked = batch.waits
        if not batch.delays or lacks != lacked:
            since = batch.steps
        left = since + (rule.balance if lacks else rule.gather) - batch.steps
        batch.waits = since, lacks
        batch.delays = True  # until one is admitted
        return left if left > 0 and (lacks or not self._fills()) else 0

    def _eligible(self) -> Iterator[ServedRequest]:
        """The waiting requests that the scheduler has seen and whose adapters have a slot."""
        for job in islice(self.waiting, len(self.waiting) - self._unseen):
            if self.adapters is None or self.adapters.has_room(job.request.adapter):
                yield job

    def _fills(self) -> bool:
        """Whether prompts that wait fill 9/10 of the next step."""
        least = 9 * self.limits.tokens - 10 * self._batch.decoding
        return any(10 * n >= least for n in accumulate(job.left for job in self._eligible()))

    def _make_room(self) -> int:
        """Preempt sequences, the last admitted first, until the next step has its pages. Returns
        the time to swap them."""
        took = 0
        while True:
            needed = self._batch.begun + sum(self._grown(*chunk) for chunk in self._rest())
            if needed <= self._left:
                return took
            took += self._preempt(self._last_admitted())

    def _last_admitted(self) -> ServedRequest:
        return self._batch.last_admitted()

    def _preempt(self, job: ServedRequest) -> int:
        self._stop(job)
        job.preempted += 1
        self.tally.preempted += 1
        self.waiting.appendleft(job)
        if self.swap and job.left == 1:  # with tokens that others share
            job.swapped = True
            self.tally.swapped += 1
            return self.swap * job.cached
        self.tally.lost += job.cached
        job.cached = 0
        return 0

    def _stop(self, job: ServedRequest) -> None:
        """Remove a running job from the batch and free its pages."""
        if job.ends < 0:
            self._partial.pop(job, None)
        else:
            self._batch.leave(job)
        self.release(job)

    def release(self, job: ServedRequest) -> None:
        """End a job that does not decode: free its adapter slot, and its pages except those of
        prefixes in use."""
        job.stamp = job.ready = 0
        self.running -= 1
        if self.adapters is not None:
            self.adapters.leave(job.request.adapter)
        self.free += self.limits.blocks_for(job.cached)
        self._reserved -= self._at_end(job)
        if self.prefixes is not None and job.shared:
            idle = self.prefixes.leave(job.shared)
            self.free -= (len(job.shared) - idle) * self.prefixes.pages
            job.shared = []

    def _admit(self, budget: int, chunks: list[tuple[ServedRequest, int]]) -> int:
        """Admit waiting requests while tokens, sequences and pages last, skipping those whose
        adapters have no slot. Returns the time to swap them in and to load adapters."""
        took, limits, waiting = 0, self.limits, self.waiting
        passed: list[ServedRequest] = []
        while len(waiting) > self._unseen and budget > 0 and self._has_place():
            job = waiting[0]
            if self.adapters is not None and not self.adapters.has_room(job.request.adapter):
                passed.append(waiting.popleft())
                continue
            if self.scheduler.reserve and self._reserved + self._at_end(job) > self.room:
                break
            matched = self._matched(job)
            below = self._below(job, len(matched))
            cached = job.cached or (len(matched) + len(below)) * self.prefix_block
            left = job.request.prompt + job.generated - cached
            tokens = min(left, budget, self._chunk_tokens)
            needed = limits.blocks_for(cached + tokens)
            if self.prefixes is not None and matched:
                needed -= (len(matched) - self.prefixes.idle(matched)) * self.prefixes.pages
            if self._needs(job, needed) > self._left - self._batch.begun:
                break
            waiting.popleft()
            took += self.swap * job.cached if job.swapped else 0
            job.swapped = False
            self._begin(job, matched)
            took += self._load(job, below)
            if self.adapters is not None and self.adapters.use(job.request.adapter):
                took += self.adapters.load
                self.tally.adapters += 1
            if job.ready <= self._now:
                budget -= self._take(job, tokens, chunks)
        waiting.extendleft(reversed(passed))
        return took

    def _needs(self, job: ServedRequest, pages: int) -> int:
        """The free pages with which a job is admitted whose next chunk takes so many."""
        return pages

    def _below(self, job: ServedRequest, matched: int) -> Sequence[CacheTier]:
        """The tiers that have the blocks behind the matched ones, for a job that begins."""
        if self.tiers is None or job.cached or not job.request.prefix:
            return ()
        most = (job.request.prompt - 1) // self.prefix_block
        return self.tiers.match(job.request.prefix[matched:most])

    def _load(self, job: ServedRequest, below: Sequence[CacheTier]) -> int:
        """Load blocks for a job that has begun. Returns the time for which the step waits."""
        if not below or self.tiers is None or self.prefixes is None:
            return 0
        before, tokens = len(job.shared), len(below) * self.prefix_block
        blocks = job.request.prefix[before : before + len(below)]
        took = self.tiers.use(blocks, below)
        self._give(self._grown(job, tokens))
        job.cached += tokens
        self._keep(job, job.cached)
        self.tally.hits += tokens
        for tier in below:
            self.tally.loaded[tier.name] += self.prefix_block
        job.hit += 0 if job.preempted else tokens
        if self.tiers.blocking:
            return took
        job.ready = self._link = max(self._link, self._now) + took
        return 0

    def _at_end(self, job: ServedRequest) -> int:
        """The number of pages of a job when it ends."""
        return self.limits.blocks_for(job.request.prompt + job.request.output - 1)

    def _matched(self, job: ServedRequest) -> Sequence[int]:
        """The cached blocks of the prefix of a job that begins."""
        if self.prefixes is None or job.cached or not job.request.prefix:
            return ()
        most = (job.request.prompt - 1) // self.prefix_block  # at least one token is computed
        return job.request.prefix[: self.prefixes.match(job.request.prefix, most)]

    def _begin(self, job: ServedRequest, matched: Sequence[int]) -> None:
        """Let a job run, with pages for its cached tokens."""
        pages = 0
        if matched and self.prefixes is not None:
            pages = (len(matched) - self.prefixes.idle(matched)) * self.prefixes.pages
            self.prefixes.use(matched)
            job.shared = list(matched)
            job.cached = len(matched) * self.prefix_block
            self.tally.hits += job.cached
            job.hit = job.hit or job.cached
        self._give(self.limits.blocks_for(job.cached) - pages)
        self._reserved += self._at_end(job)
        self._stamp += _STAMPS
        job.stamp, job.replica = self._stamp, self.number
        self._batch.admit(job, self.running)
        self._batch.delays = False
        self.running += 1
        self._partial[job] = None

    def _take(
        self, job: ServedRequest, tokens: int, chunks: list[tuple[ServedRequest, int]]
    ) -> int:
        """Let a job add tokens in the next step: as a chunk of its prompt, or in decode. Returns
        the number of tokens."""
        if job.left == 1 and job.generated and self._batched:
            self._decode(job)
        elif tokens:
            self._give(self._grown(job, tokens))
            chunks.append((job, tokens))
        return tokens

    def _decode(self, job: ServedRequest) -> None:
        """Let a job decode from the next step on."""
        self._partial.pop(job, None)
        self._batch.join(job)

    def _grown(self, job: LiveRequest, tokens: int) -> int:
        blocks = self.limits.blocks_for
        return blocks(job.cached + tokens) - blocks(job.cached)

    def _give(self, pages: int) -> None:
        """Take pages from the free ones, and evict unused blocks of prefixes for them."""
        self.free -= pages
        if self.prefixes is not None:
            self.prefixes.shrink(self.free)

    # -- duration and end of steps -----------------------------------------------------------------

    def _under_way(
        self, now: int, delay: int, chunks: list[tuple[ServedRequest, int]], most: int
    ) -> StepsUnderWay:
        """The next steps, at most `most`, of which the first one begins after a delay."""
        count, total = self._batch.decoding, self._batch.total
        if chunks:
            pieces = [(tokens, job.cached) for job, tokens in chunks]
            beside = (0, 0) if self.alone else (count, total)
            end = now + delay + self.costs.mixed(*beside, pieces)
            return StepsUnderWay(now, end, 1, total, 0, None, chunks)
        line = self.costs.decode(count, total)
        steps = min(most, self._batch.until_end, 1 + (line.last - total) // count)
        if self.limits.blocks is not None:
            waits = self.prefixes if self.waiting and self._has_place() else None
            idle = waits.unused if waits is not None else 0  # a request may begin without these
            steps = self._batch.until_full(steps, self.free - idle)
        end = now + delay + line.times(total, count, steps)
        return StepsUnderWay(now, end, steps, total, count, None if delay else line, chunks)

    def cut(self, now: int) -> bool:
        """Cut the steps in flight at the first end of a step that is not before `now`, and at which
        the scheduler polls. Returns whether they end sooner than before."""
        way, batch = self.way, self._batch
        if way is None or way.line is None:
            return False
        count = way.done(now) + 1
        count += (batch.polled - batch.steps - count) % self.scheduler.poll
        if count >= way.count:
            return False
        way.cut(count)
        return True

    def finish(self, now: int) -> tuple[list[ServedRequest], list[ServedRequest]]:
        """Complete the steps in flight. Returns the jobs that end, and those whose prompts are now
        complete."""
        batch, way, tally = self._batch, self.way, self.tally
        if way is None:
            raise ValueError("no steps are under way")
        self.way = None
        tally.steps += way.count
        if batch.decoding and not (way.chunks and self.alone):
            self._advance(way.count)
        self._unseen = batch.poll(self.scheduler.poll, self._unseen, now=bool(way.chunks))
        prompts = [job for job, tokens in way.chunks if self._chunk(job, tokens, now)]
        return self._ended(now), prompts

    def _advance(self, count: int) -> None:
        self._give(self._batch.advance(count))
        self.tally.decoded += count * self._batch.decoding

    def _chunk(self, job: ServedRequest, tokens: int, now: int) -> bool:
        """Complete a chunk. Returns whether it was the last one of its prompt."""
        self.tally.computed += tokens
        job.cached += tokens
        if job.left:
            return False
        job.generated += 1
        if self.prefixes is not None:
            self._keep(job, job.request.prompt)
        if self.prefills and job.generated < job.request.output:
            self._partial.pop(job)
            return True  # its token counts when its caches have been transferred
        if job.first < 0:
            job.first = now
        self._decode(job)  # a job that has all its tokens ends at once
        return True

    def _keep(self, job: ServedRequest, tokens: int) -> None:
        """Cache the whole blocks among the first tokens of a job for requests with its prefix."""
        prefix, cache = job.request.prefix, self.prefixes
        if cache is None or not prefix:
            return
        for block in prefix[len(job.shared) : tokens // self.prefix_block]:
            if not cache.add(block):
                break  # another request has computed it in the meantime
            job.shared.append(block)

    def _ended(self, now: int) -> list[ServedRequest]:
        done = self._batch.ended()
        for job in done:
            request, job.last = job.request, now
            if self.prefixes is not None and request.prefix:
                self._keep(job, request.prompt + request.output - 1)
            self._stop(job)
            job.generated = request.output
        return done

    def fail(self, now: int) -> list[ServedRequest]:
        """Lose all caches and steps in flight. Returns the jobs in order; generated tokens are not
        lost."""
        if done := self._steps_done(now):
            self._advance(done)
            self.tally.steps += done
        jobs = [*self.live(), *self.waiting]
        for job in jobs[: len(jobs) - len(self.waiting)]:
            job.preempted += 1
        for job in jobs:
            self.tally.lost += job.cached
            job.cached, job.ends, job.stamp, job.swapped, job.shared = 0, -1, 0, False, []
            job.ready = 0
        self.waiting.clear()
        self._batch = Batch.of(self.limits.block)
        self.running = self._reserved = self._unseen = 0
        self._partial, self.free = {}, self.room
        self.forget()
        self.way = None
        return jobs

    def forget(self) -> None:
        """Lose prefixes and adapters."""
        if self.prefixes is not None:
            self.prefixes.clear()
        if self.adapters is not None:
            self.adapters.users.clear()

    def kept_tokens(self, now: int) -> int:
        """The generated tokens of the requests that it has."""
        steps = self._steps_done(now) * self._batch.decoding
        return steps + sum(job.generated for job in (*self.live(), *self.waiting))

    def _steps_done(self, now: int) -> int:
        """How many of the decode steps in flight are done."""
        return self.way.done(now) if self.way is not None else 0

    def live(self) -> list[ServedRequest]:
        """The running jobs in order of admission, with their tokens up to date."""
        return self._batch.live()
