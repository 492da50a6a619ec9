"""Sequences of a replica that decode together, and the pages of the cache that they begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from stagec.serving.served import ServedRequest


@dataclass(slots=True)
class Batch:
    """Sequences that decode together. Of the `decoding` ones `total` tokens are cached; `steps`
    counts the decode steps so far. `phases` has how many of them begin a page in a step, by its
    number modulo the tokens of a page. `ends` is a heap of the last steps, `order` has those that
    run in order of admission; both keep entries of sequences that have left. New requests were
    looked for at step `polled`; while one `delays` prompts, these wait since a step for others, or
    for some of all groups (`waits`)."""

    phases: list[int]
    number: int = 0
    steps: int = 0
    decoding: int = 0
    total: int = 0
    ends: list[tuple[int, int, ServedRequest]] = field(
        default_factory=list[tuple[int, int, ServedRequest]]
    )
    order: list[tuple[int, ServedRequest]] = field(default_factory=list[tuple[int, ServedRequest]])
    polled: int = 0
    waits: tuple[int, bool] = (0, False)
    delays: bool = False

    @classmethod
    def of(cls, block: int, number: int = 0) -> Batch:
        """One without sequences; a page has `block` tokens."""
        return cls([0] * block, number)

    @property
    def coming(self) -> int:
        """The pages that are begun in the next step."""
        return self.phases[-self.steps % len(self.phases)]

    # -- who is in it ------------------------------------------------------------------------------

    def admit(self, job: ServedRequest, running: int) -> None:
        """A job begins, beside so many others of the replica."""
        self.order.append((job.stamp, job))
        if len(self.order) > 2 * running + 64:
            self.order = [each for each in self.order if each[1].stamp == each[0]]

    def join(self, job: ServedRequest) -> None:
        """A job decodes from the next step on."""
        self.decoding += 1
        self.total += job.cached
        self.phases[(job.cached - self.steps) % len(self.phases)] += 1
        job.ends = self.steps + job.request.output - job.generated
        heappush(self.ends, (job.ends, job.stamp, job))

    def leave(self, job: ServedRequest) -> None:
        """A job that decodes stops."""
        self.decoding -= 1
        self._count(job)
        self.total -= job.cached
        self.phases[(job.cached - self.steps) % len(self.phases)] -= 1
        job.ends = -1

    def _count(self, job: ServedRequest) -> None:
        """Note what a job that decodes has by now."""
        job.generated = job.request.output - (job.ends - self.steps)
        job.cached = job.request.prompt + job.generated - 1

    def last_admitted(self) -> ServedRequest:
        """The job that came last of those that run, which is not in the order any more."""
        while True:
            stamp, job = self.order.pop()
            if job.stamp == stamp:
                return job

    def live(self) -> list[ServedRequest]:
        """The jobs that run, in order of admission, with what each has."""
        running = [job for stamp, job in self.order if job.stamp == stamp]
        for job in running:
            if job.ends >= 0:
                self._count(job)
        return running

    # -- steps -------------------------------------------------------------------------------------

    @property
    def until_end(self) -> int:
        """Steps until the first sequence that decodes ends."""
        ends = self.ends
        while ends[0][2].ends != ends[0][0] or ends[0][2].stamp != ends[0][1]:
            heappop(ends)
        return ends[0][0] - self.steps

    def until_full(self, steps: int, free: int) -> int:
        """Steps for which so many free pages are enough, of so many: at least one."""
        block, phases = len(self.phases), self.phases
        if -(-steps // block) * self.decoding <= free:
            return steps
        rounds = max(0, free // self.decoding - 1) if self.decoding else 0
        free -= rounds * self.decoding
        done = rounds * block
        while done < steps:
            free -= phases[-(self.steps + done) % block]
            if free < 0:
                break
            done += 1
        return max(1, min(done, steps))

    def advance(self, count: int) -> int:
        """So many steps are done; the pages that were begun in them."""
        block, phases = len(self.phases), self.phases
        rounds, rest = divmod(count, block)
        pages = rounds * self.decoding
        pages += sum(phases[-(self.steps + i) % block] for i in range(rest))
        self.steps += count
        self.total += count * self.decoding
        return pages

    def ended(self) -> list[ServedRequest]:
        """The jobs that have all their tokens, which are taken out of `ends`."""
        done: list[ServedRequest] = []
        ends = self.ends
        while ends and ends[0][0] <= self.steps:
            _, stamp, job = heappop(ends)
            if job.stamp == stamp and job.ends >= 0:
                done.append(job)
        return done
