"""Servers under closed loops, as in benchmarks: a fixed number of concurrent requests. Their events
are simulated by `stagec.serving`, with costs interpolated between a few compiled steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from stagec.analysis.memory_fit import room_of
from stagec.ir.serving_step import MIXED
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.builder import JobBuilder
from stagec.jobs.figures import CompiledJob
from stagec.jobs.request.machine import on_machine
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.steps import BLOCK
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.memory.timeline import CACHES
from stagec.serving.policy import ServerLimits
from stagec.serving.replica import Replica
from stagec.serving.requests import Request
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Simulation
from stagec.serving.step import SequenceClass, step_of
from stagec.serving.step_times import SECOND, StepLine
from stagec.sharding.strategy import read_strategy
from stagec.time.streams import PICOSECONDS

#: A bound that exceeds the cached tokens of all sequences.
_MOST = 1 << 60

#: The prompt tokens of each group in a step, and the femtoseconds of the step.
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class FewSteps:
    """`StepCosts` interpolated linearly between a few steps. A decode step takes from `one` to
    `most` femtoseconds, for one and for `count` sequences of each of the `groups` of ranks,
    whatever is cached. Prompts take `alone` femtoseconds in their own step, and add `beside` to a
    decode step."""

    groups: int
    count: int
    one: float
    most: float
    alone: Points
    beside: Points

    def decode(self, count: int, total: int) -> StepLine:
        """The cost of decode steps."""
        return StepLine(max(1, round(self._decode(count))), 0, 0, _MOST)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        """The cost of a step with chunks of prompts."""
        tokens = sum(new for new, _ in chunks) / len(chunks) * -(-len(chunks) // self.groups)
        if not count:
            return max(1, round(_between(self.alone, tokens)))
        return max(1, round(self._decode(count) + _between(self.beside, tokens)))

    def _decode(self, count: int) -> float:
        share = (-(-count // self.groups) - 1) / max(1, self.count - 1)
        return self.one + share * (self.most - self.one)


def _between(points: Points, value: float) -> float:
    """Linear interpolation between points, with extrapolation beyond the last one."""
    (x, y), *later = points
    for i, (then, more) in enumerate(later):
        if value <= then or i == len(later) - 1:
            return y + (more - y) * (value - x) / (then - x)
        x, y = then, more
    return y


@dataclass(frozen=True)
class ClosedLoop:
    """A server and its load: `batch` concurrent requests, `rounds` times that in all, of which the
    first arrive at once. `prompt` and `output` are mean lengths. Lengths are drawn between
    `2 share - 1` and 1 times the stated length, whose mean is its `share`."""

    options: JobOptions
    machine: Machine
    batch: int
    prompt: int
    output: int
    share: float
    rounds: int

    def means(self) -> tuple[float, float]:
        """The mean seconds from a request to its first token, with those outside of its steps, and
        the mean seconds between tokens. Raises `DiagnosticError`."""
        plain = self.options.changed(serve=MIXED, step="decode=1x1", prompt=None)
        module = JobBuilder(plain).module
        strategy = read_strategy(module)
        groups, rule = module.env[strategy.batch], strategy.one(SchedulerRule)
        each = -(-self.batch // groups)
        fits = max(1, (rule.tokens - each) // self.prompt)
        one = self._step(1)
        jobs = one, self._step(each), self._step(each, fits)
        reports = [job.time(self.machine) for job in jobs]
        single, most, full = (report.step_seconds for report in reports)
        first, alone, all_alone = (
            job.time(self.machine).step_seconds
            for job in (self._step(each, 1), self._step(0, 1), self._step(0, fits))
        )
        size = min(self.prompt, max(1, rule.tokens - each))
        costs = FewSteps(
            groups,
            each,
            single * SECOND,
            most * SECOND,
            _points(single, (size, alone), (size * fits, all_alone)),
            _points(0.0, (size, first - most), (size * fits, full - most)),
        )
        blocks = self._blocks(jobs[1:], groups, each, rule)
        limits = ServerLimits(rule.tokens * groups, self.batch, blocks, BLOCK, groups=groups)
        replica = Replica(0, limits, costs, scheduler=rule)
        run = Simulation(
            self._requests(), [replica], ROUTERS["least-loaded"], concurrency=self.batch
        )
        run.run()
        waits = fmean(job.first - job.arrival for job in run.done) / SECOND
        between = fmean((job.last - job.first) / (job.request.output - 1) for job in run.done)
        return reports[0].step.request / PICOSECONDS + waits, between / SECOND

    def _step(self, decodes: int, prompts: int = 0) -> CompiledJob:
        """A step with these numbers of decoding sequences and of prompts in each group."""
        classes = [SequenceClass(self.prompt, 0, 1, prompts)] if prompts else []
        if decodes:
            classes.append(SequenceClass(1, self.prompt + self.output // 2, 1, decodes))
        asked = self.options.changed(serve=MIXED, step=str(step_of(classes)), prompt=None)
        return CompiledJob.of(on_machine(asked, self.machine), Session())

    def _blocks(
        self, jobs: Sequence[CompiledJob], groups: int, each: int, rule: SchedulerRule
    ) -> int | None:
        """The blocks of the caches of all groups, in the memory that weights and activations leave;
        at least those of one request in each group."""
        decode, full = (job.figures() for job in jobs)
        room = rule.room(room_of(self.machine, full.mesh))
        tokens = each * (self.prompt + self.output // 2)
        blocks = [
            (room - sum(memory.values()) + memory[CACHES]) * tokens // (cached[CACHES] * BLOCK)
            for memory, cached in zip(full.by_stage, decode.by_stage, strict=True)
            if cached.get(CACHES)
        ]
        least = -(-round((self.prompt + self.output) / self.share) // BLOCK)
        return max(min(blocks), least) * groups if blocks else None

    def _requests(self) -> list[Request]:
        source = Random(0)

        def draw(mean: int) -> int:
            least = max(1, round(mean * (2 - 1 / self.share)))
            return source.randint(least, round(mean / self.share))

        numbers = range(self.batch * self.rounds)
        return [Request(0, draw(self.prompt), max(2, draw(self.output))) for _ in numbers]


def _points(start: float, *points: tuple[int, float]) -> Points:
    """Points in femtoseconds, from seconds; of points with equal tokens the last one counts."""
    distinct = dict(points)
    return [(0.0, start * SECOND), *((float(n), at * SECOND) for n, at in distinct.items())]
