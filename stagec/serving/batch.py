"""The sequences of a replica that decode together, and the pages of the cache that they begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from stagec.serving.served import ServedRequest


@dataclass(slots=True)
class Batch:
    """The sequences that decode together.

    `decoding` is their number and `total` the sum of their cached tokens; `steps` counts the decode
    steps so far. `phases[i]` is how many of them have `cached - steps` congruent to i modulo the
    tokens of a page, which stays as they grow: these begin a page in each step for which `-steps`
    is congruent to i. `ends` is a heap by last step, `order` has the running sequences in order of
    admission; both keep entries of sequences that have left. The scheduler last looked for new
    requests at step `polled`; `late` are its looks since then among the steps in flight, and the
    requests that have arrived after the last of these. While the batch `delays` prompts, `waits` is
    the step since which they wait, and whether they wait for requests of all groups.
    """

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
    late: tuple[int, int] = (0, 0)
    waits: tuple[int, bool] = (0, False)
    delays: bool = False

    @classmethod
    def of(cls, block: int, number: int = 0) -> Batch:
        """A batch without sequences; a page has `block` tokens."""
        return cls([0] * block, number)

    @property
    def begun(self) -> int:
        """The number of pages that sequences begin in the next step."""
        return self.phases[-self.steps % len(self.phases)]

    # -- looks for new requests --------------------------------------------------------------------

    def arrive(self, done: int, every: int) -> None:
        """Count a request that arrives when `done` steps in flight are done."""
        looks, late = self.late
        now = (self.steps + done - self.polled) // every
        self.late = now, late + 1 if now == looks else 1

    def poll(self, every: int, unseen: int, *, now: bool) -> int:
        """Note the last look after steps in flight, which is at each `every`-th step, and `now` if
        so. Returns how many of the requests that were not seen before still are not."""
        since, (looks, late) = self.steps - self.polled, self.late
        self.late = 0, 0
        if not now and since < every:
            return unseen
        self.polled = self.steps - (0 if now else since % every)
        return late if not now and looks == since // every else 0

    # -- membership --------------------------------------------------------------------------------

    def admit(self, job: ServedRequest, running: int) -> None:
        """Add a job that begins to run; `running` jobs of the replica run already."""
        self.order.append((job.stamp, job))
        if len(self.order) > 2 * running + 64:
            self.order = [each for each in self.order if each[1].stamp == each[0]]

    def join(self, job: ServedRequest) -> None:
        """Let a job decode from the next step on."""
        self.decoding += 1
        self.total += job.cached
        self.phases[(job.cached - self.steps) % len(self.phases)] += 1
        job.ends = self.steps + job.request.output - job.generated
        heappush(self.ends, (job.ends, job.stamp, job))

    def leave(self, job: ServedRequest) -> None:
        """Let a job stop decoding."""
        self.decoding -= 1
        self._count(job)
        self.total -= job.cached
        self.phases[(job.cached - self.steps) % len(self.phases)] -= 1
        job.ends = -1

    def _count(self, job: ServedRequest) -> None:
        """Set the tokens that a decoding job has generated and cached by now."""
        job.generated = job.request.output - (job.ends - self.steps)
        job.cached = job.request.prompt + job.generated - 1

    def last_admitted(self) -> ServedRequest:
        """The running job that was admitted last; removes it from the order."""
        while True:
            stamp, job = self.order.pop()
            if job.stamp == stamp:
                return job

    def live(self) -> list[ServedRequest]:
        """The running jobs in order of admission, with their tokens up to date."""
        running = [job for stamp, job in self.order if job.stamp == stamp]
        for job in running:
            if job.ends >= 0:
                self._count(job)
        return running

    # -- steps -------------------------------------------------------------------------------------

    @property
    def until_end(self) -> int:
        """The number of steps until the first decoding sequence ends."""
        ends = self.ends
        while ends[0][2].ends != ends[0][0] or ends[0][2].stamp != ends[0][1]:
            heappop(ends)
        return ends[0][0] - self.steps

    def until_full(self, steps: int, free: int) -> int:
        """The number of steps, from 1 to `steps`, for which `free` pages are enough."""
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
        """Complete `count` steps. Returns the number of pages that were begun in them."""
        block, phases = len(self.phases), self.phases
        rounds, rest = divmod(count, block)
        pages = rounds * self.decoding
        pages += sum(phases[-(self.steps + i) % block] for i in range(rest))
        self.steps += count
        self.total += count * self.decoding
        return pages

    def ended(self) -> list[ServedRequest]:
        """The jobs that have all their tokens; removes them from `ends`."""
        done: list[ServedRequest] = []
        ends = self.ends
        while ends and ends[0][0] <= self.steps:
            _, stamp, job = heappop(ends)
            if job.stamp == stamp and job.ends >= 0:
                done.append(job)
        return done
