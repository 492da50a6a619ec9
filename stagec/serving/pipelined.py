"""A replica on pipeline stages, with as many batches in flight as there are stages.

A batch has sequences of its own and at most one step in flight. When that step is done, the next
one is planned, from the sequences of the batch and from waiting requests. All batches share the
queue, the pages of the cache, and prompts that have begun: chunks of one prompt follow each other
through the stages. vLLM (`max_concurrent_batches`) and SGLang (`event_loop_pp`) have as many
batches in flight; a batch has its share of the sequences that may run, or as many as
`stg.scheduler[batch = ...]` states (`pp_max_micro_batch_size`).

Each step has two times: that from the first stage to the last, and its `pace`, the time of its
slowest stage. Step n begins when the first stage is free, and is done when it has passed all
stages, behind the step before it (a flow shop of proportionate stages, for which this is exact;
Pinedo, Scheduling, section 6.1):

    begin(n) = max(planned(n), begin(n - 1) + pace(n - 1))
    end(n) = max(begin(n) + time(n), end(n - 1) + pace(n))
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from stagec.serving.batch import Batch
from stagec.serving.replica import Replica
from stagec.serving.served import ServedRequest, StepsUnderWay
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.serving.step_times import StepCosts


class PipelinedReplica(Replica):
    """A replica on `stages` pipeline stages; `pace` has the time of the slowest stage of a step."""

    def __init__(self, *about: Any, pace: StepCosts, stages: int, **more: Any) -> None:
        super().__init__(*about, **more)
        self.pace, self.stages = pace, stages
        batch = self.scheduler.batch * self.limits.groups
        self._share = batch or -(-self.limits.sequences // stages)
        self._under: deque[tuple[int, StepsUnderWay]] = deque()
        self._begin_batches()

    def _begin_batches(self) -> None:
        """Start with empty batches."""
        self._batches = [Batch.of(self.limits.block, number) for number in range(self.stages)]
        self._batch = self._batches[0]
        self._done = self._free_at = self._ended_at = 0
        self._under.clear()

    # -- the next steps ----------------------------------------------------------------------------

    def plan(self, now: int) -> StepsUnderWay | None:
        """Begin the next step of each batch without a step in flight, first of the batch whose step
        has just been done. Returns the step that is done first."""
        under, first = {batch for batch, _ in self._under}, self._done
        for batch in (*range(first, self.stages), *range(first)):
            if batch not in under:
                self.plan_batch(batch, now)
        self.way = self._under[0][1] if self._under else None
        return self.way

    def plan_batch(self, batch: int, now: int) -> StepsUnderWay | None:
        """Begin the next step of a batch; None if there is nothing to do."""
        self._batch = self._batches[batch]
        way = super().plan(now)
        if way is not None:
            self._under.append((batch, way))
        return way

    def looks(self, now: int) -> bool:
        """Plan again now if a batch has no step in flight for a request that has just arrived."""
        soon = self.way is not None and not self.way.count
        if soon or len(self._under) == self.stages or (len(self.waiting) > 1 and not self.adapters):
            return False
        self.way = StepsUnderWay(now, now, 0, 0, 0, None, [])
        return True

    def finish(self, now: int) -> tuple[list[ServedRequest], list[ServedRequest]]:
        if self.way is not None and not self.way.count:
            self.way = None
            return [], []
        self._done, self.way = self._under.popleft()
        self._batch = self._batches[self._done]
        return super().finish(now)

    def _under_way(
        self, now: int, delay: int, chunks: list[tuple[ServedRequest, int]], most: int
    ) -> StepsUnderWay:
        time, pace = (self._time(costs, chunks) for costs in (self.costs, self.pace))
        end = self._passes(now + delay, time, pace)
        return StepsUnderWay(now, end, 1, self._batch.total, 0, None, chunks)

    def _passes(self, now: int, time: int, pace: int) -> int:
        """When a step that is planned now has passed all stages."""
        begin = max(now, self._free_at)
        self._free_at = begin + pace
        self._ended_at = max(begin + time, self._ended_at + pace)
        return self._ended_at

    def composition(self, chunks: Sequence[tuple[ServedRequest, int]]) -> Step:
        """The sequences of the step that was planned last, which has these chunks."""
        classes = [SequenceClass(n, job.cached - n, int(not job.left)) for job, n in chunks]
        if not (chunks and self.alone):
            live = dict.fromkeys(self._batch.live())
            mine = (job for job in live if job.ends >= 0 and job.batch == self._batch.number)
            classes += [SequenceClass(1, job.cached, 1) for job in mine]
        return step_of(classes)

    def _time(self, costs: StepCosts, chunks: Sequence[tuple[ServedRequest, int]]) -> int:
        if not chunks:
            return costs.decode(self._batch.decoding, self._batch.total).time(self._batch.total)
        beside = (0, 0) if self.alone else (self._batch.decoding, self._batch.total)
        return costs.mixed(*beside, [(tokens, job.cached - tokens) for job, tokens in chunks])

    # -- shared by batches -------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        decode = (self._batches[n] for n, way in self._under if not (way.chunks and self.alone))
        return self.free - sum(batch.begun for batch in decode)

    def _has_place(self) -> bool:
        begun = sum(job.batch == self._batch.number for job in self._partial)
        return super()._has_place() and self._batch.decoding + begun < self._share

    def _needs(self, job: ServedRequest, pages: int) -> int:
        """All pages of a job that was preempted, or batches would preempt each other forever."""
        return max(pages, self._at_end(job)) if job.preempted and self.stages > 1 else pages

    def _rest(self) -> list[tuple[ServedRequest, int]]:
        """The next chunks; of prompts of other batches only those for which there are pages."""
        rest, pages, left = list[tuple[ServedRequest, int]](), self._batch.begun, self._left
        for job, tokens in super()._rest():
            own, grown = job.batch == self._batch.number, self._grown(job, tokens)
            decodes = job.left == 1 and job.generated
            if tokens and (own or (pages + grown <= left and not decodes)):
                rest.append((job, tokens))
                pages += grown
        return rest

    def _begin(self, job: ServedRequest, matched: Sequence[int]) -> None:
        super()._begin(job, matched)
        job.batch = self._batch.number

    def _take(
        self, job: ServedRequest, tokens: int, chunks: list[tuple[ServedRequest, int]]
    ) -> int:
        """Let a job add tokens and move to the batch of its last chunk. Tokens in flight count as
        cached, so that the next chunk can follow them."""
        before = len(chunks)
        taken = super()._take(job, tokens, chunks)
        if len(chunks) > before:
            job.cached += tokens
            if job.batch != self._batch.number:
                job.batch = self._batch.number
                insort(self._batch.order, (job.stamp, job), key=lambda each: each[0])
        return taken

    def _last_admitted(self) -> ServedRequest:
        while True:
            job = super()._last_admitted()
            if job.batch == self._batch.number:
                return job

    def _chunk(self, job: ServedRequest, tokens: int, now: int) -> bool:
        if job.batch != self._batch.number or job.left:  # further chunks are in flight
            self.tally.computed += tokens
            return False
        job.cached -= tokens
        return super()._chunk(job, tokens, now)

    def live(self) -> list[ServedRequest]:
        each: list[ServedRequest] = []
        for batch in range(self.stages):
            self._batch = self._batches[batch]
            self._batch.order = [e for e in dict.fromkeys(self._batch.order) if e[1].batch == batch]
            each += super().live()
        return sorted(each, key=lambda job: job.stamp)

    def fail(self, now: int) -> list[ServedRequest]:
        for job, tokens in (chunk for _, way in self._under for chunk in way.chunks):
            job.cached -= tokens
        jobs = super().fail(now)
        self._begin_batches()
        return jobs
