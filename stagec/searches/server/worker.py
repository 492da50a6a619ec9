"""Times the steps of a worker of a server at each batch.

The ranks of a worker share the weights and wait for each other; a server has several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import lcm, prod
from typing import TYPE_CHECKING, Any, TypeVar

from stagec.analysis.serving_rates import (
    PodStep,
    ServingRates,
    chunked,
    chunks_pass,
    colocated,
    steady_parts,
    steady_seconds,
    turns_of,
)
from stagec.analysis.steady_server import PromptChunks, among_groups, chunks, per_token
from stagec.answers.serve_steps import coupled_groups, lone_share, shared_seconds
from stagec.ir.serving_step import DECODE, MIXED, PREFILL
from stagec.ir_spec.strategy.scheduler import ALONE, SchedulerRule
from stagec.jobs.builder import JobBuilder
from stagec.jobs.lowered import job_costs
from stagec.jobs.pod_options import has_pods
from stagec.jobs.pods import Pods
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.machine import own_machine
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.step_modules import groups_in
from stagec.jobs.step_timer import StepTimer
from stagec.memory.timeline import CACHES
from stagec.searches.explore.reasons import grouped
from stagec.serving.step import SequenceClass, step_of
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.time.streams import PICOSECONDS

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The most sequences of a group of ranks that are tried, and the number of bisections between two
#: batches for the largest one that is possible.
_MOST, _HALVINGS = 4096, 4
_ONE = "decode=1x1"
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server: the tokens of prompts and outputs, and the limits of the times to the
    first token and for each further one, in seconds. `cached` tokens before a prompt are in the
    cache, from requests with the same prefix. A step of decode verifies `drafts` tokens of each
    sequence, and generates `accepted` tokens on average."""

    prompt: int
    output: int
    ttft: float | None = None
    tpot: float | None = None
    cached: int = 0
    drafts: int = 0
    accepted: float = 1.0

    @property
    def context(self) -> int:
        """The mean number of cached tokens of a sequence that decodes."""
        return self.cached + self.prompt + self.output // 2

    @property
    def last(self) -> int:
        """The number of cached tokens of a sequence in its last step."""
        return self.cached + self.prompt + self.output - 1


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A worker to time. `options` is its job, of any step; `budgets` are the limits of the tokens
    of a step to try (empty: that of its scheduler), `batches` the sequences in decode (None: 1, 2,
    4, ...); `price` is the price of a rank for an hour, if known. `measured` has the values of
    `MEASURED`, whose tables each process reads once."""

    options: JobOptions
    machine: Machine
    limit: Limit
    load: ServerLoad
    budgets: tuple[int, ...]
    batches: tuple[int, ...] | None = None
    price: float | None = None
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step of a worker with `sequences` sequences in flight on all its stages together: seconds
    between the ends of two steps, their breakdown (`parts`), and by stage the bytes of a rank
    without caches and of caches. `passes` is the time in seconds to pass all stages if no other
    step waits there. In decode with drafts, times are those of each generated token. `shared` are
    those of the tokens of several groups of ranks."""

    sequences: int
    seconds: float
    passes: float
    parts: Mapping[str, float]
    stages: Sequence[tuple[int, int]]
    shared: float = 0.0

    @property
    def peak(self) -> int:
        """The peak of a rank in bytes."""
        return max(map(sum, self.stages))

    def lasting(self, seconds: float) -> StepPoint:
        """This step in other seconds, with all parts in proportion."""
        scale = seconds / self.seconds
        parts = per_token(self.parts, scale)
        return replace(self, seconds=seconds, passes=self.passes * scale, parts=parts)


@dataclass(frozen=True, slots=True)
class MixedPoint:
    """Steps that decode, a share of which also has chunks of prompts (`work`), or which alternate
    with steps of prompts; each has at most `budget` tokens of each group of ranks."""

    decode: StepPoint
    mixed: StepPoint
    budget: int
    work: PromptChunks
    steady: ServingRates
    output: int

    @property
    def mean_seconds(self) -> float:
        """The mean seconds of a step, over those with prompts and those without."""
        rate = self.steady.tokens_per_second / self.output  # of requests
        return self.steady.batch / rate / (self.output - 1)

    @property
    def peak(self) -> int:
        """The peak of a rank in bytes."""
        return max(self.decode.peak, self.mixed.peak)


@dataclass(frozen=True, slots=True)
class Worker:
    """A timed worker. Each of its `groups` of ranks has sequences of its own. `room` is the bytes
    that a rank may hold, `request` the seconds of a request outside of its steps, `cached` the
    bytes of a prompt's caches on the rank with most of them. A worker without points does not fit;
    `refused` has the message with which the compiler refuses it. `costed_by` is as in
    `StepTimer`."""

    ranks: int
    groups: int = 1
    stages: int = 1
    room: int = 0
    request: float = 0.0
    cached: float = 0.0
    decode: Sequence[StepPoint] = ()
    mixed: Sequence[MixedPoint] = ()
    prefill: Sequence[StepPoint] = ()
    cautions: Sequence[str] = ()
    refused: str = ""
    costed_by: Mapping[str, int] = field(default_factory=dict[str, int])
    scheduler: SchedulerRule = field(default_factory=SchedulerRule)
    turns: int = 1  # the parts of a batch that take turns, each of which is a group


def kind_of(task: WorkerTask) -> Hashable:
    """A key that tasks share if they are likely to share compiles: all but degrees."""
    options = task.options
    axes = options.pp, options.tp > 1, options.ep > 1, options.dp_attention, options.etp
    return (options.stack, options.weight_dtype, *axes, options.part)


def timed_worker(task: WorkerTask) -> Worker:
    """Time all steps of a worker."""
    try:
        return _Timing(task).worker()
    except DiagnosticError as problem:
        return Worker(task.options.ranks or 1, refused=problem.diagnostics[0].message)
    except NotAnIntegerError as problem:
        return Worker(task.options.ranks or 1, refused=str(problem))


@dataclass
class _Timing:
    task: WorkerTask
    _request: float = 0.0
    _cached: float = 0.0
    _cautions: dict[str, None] = field(default_factory=dict[str, None])
    _decodes: dict[int, StepPoint | None] = field(default_factory=dict[int, "StepPoint | None"])

    def __post_init__(self) -> None:
        self._timer = StepTimer.of(self.task.machine, self.task.measured)
        options = self.task.options.changed(serve=MIXED, step=_ONE, batch=None)
        if options.pp > 1 and not options.afd:
            options = options.changed(microbatches=1)
        self._several = has_pods(options)  # whose steps have prompts or decode, not both
        pods = options.changed(serve=DECODE, step=None, context=1) if self._several else options
        builders = [*Pods.of(pods, Session()).builders.values()]
        modules = [each.module for each in builders]
        self._options = options.changed(step=None)
        self._ranks = sum(prod(each.axis_sizes.values()) for each in modules)
        self._stages = 1  # stages with their own sequences
        if not options.afd and not self._several:
            self._stages = modules[0].axis_sizes.get("pp", 1)
        strategy = read_strategy(modules[0])
        several = self._several
        self._groups = lcm(*map(groups_in, modules)) if several else modules[0].env[strategy.batch]
        self._halves = strategy.in_turn
        self._turns = strategy.turns
        scheduler, limit = strategy.one(SchedulerRule), self.task.limit
        self._scheduler = scheduler
        self._alone = scheduler.prompts == ALONE or self._several
        self._budgets = self.task.budgets or (scheduler.tokens,)
        own = (own_machine(each.options, self.task.machine) for each in builders)
        rooms = [limit.room(m.axis_sizes, each) for m, each in zip(modules, own, strict=True)]
        at_hand = limit.text == AT_HAND
        self._rooms = [scheduler.room(room) if at_hand else room for room in rooms]

    @cached_property
    def _coupled(self) -> int:
        """The number of groups that wait for each other, whose prompts come independently."""
        if self._several or self._groups == 1:
            return 1
        module = JobBuilder(self._options.changed(step=_ONE)).module
        return coupled_groups(self.task.options, module)

    @cached_property
    def _lone_share(self) -> tuple[int, float]:
        """As `lone_share`, of groups with prompts of their own."""
        if self._coupled == 1:
            return 1, 1.0
        load = self.task.load
        asked = self._options.changed(prompt=load.prompt, context=load.cached or None)
        return lone_share(asked, self._timer, Session())

    def worker(self) -> Worker:
        task = self.task
        batches = task.batches
        wanted = None if batches is None else [*map(self._each, batches)]
        decode = list(_climbed(self._decode, self._is_slow, wanted))
        mixed: list[MixedPoint] = []
        # steps with drafts only decode
        for budget in self._budgets if decode and not task.load.drafts else ():
            mixed += _climbed(partial(self._mixed, budget), self._is_late, wanted)
        prefill = [*self._prefills()] if decode else []
        room = min(self._rooms)
        about = self._ranks, self._groups, self._stages, room, self._request, self._cached
        steps = decode, mixed, prefill, tuple(self._cautions)
        costed_by = dict(self._timer.costed_by)
        rule, turns = self._scheduler, self._turns
        return Worker(*about, *steps, costed_by=costed_by, scheduler=rule, turns=turns)

    def _each(self, batch: int) -> int:
        """The sequences of each group and stage, for a batch of the worker."""
        return max(1, batch // (self._groups * self._stages))

    def _is_slow(self, point: StepPoint) -> bool:
        limit = self.task.load.tpot
        return limit is not None and point.seconds > limit

    def _is_late(self, point: MixedPoint) -> bool:
        load, steady = self.task.load, point.steady
        slow = load.tpot is not None and steady.tpot > load.tpot
        return slow or (load.ttft is not None and steady.ttft > load.ttft)

    # -- steps -------------------------------------------------------------------------------------

    def _decode(self, each: int) -> StepPoint | None:
        if each not in self._decodes:
            batch, load = each * self._groups, self.task.load
            step = {"batch": batch, "context": load.context, "speculative": load.drafts or None}
            asked = self._options.changed(serve=DECODE, **step)
            about: dict[str, Any] = {"reserved": self._reserved(asked, context=load.last)}
            about["gives"] = load.accepted
            self._decodes[each] = self._step(asked, batch * self._stages, **about)
        return self._decodes[each]

    def _mixed(self, budget: int, each: int) -> MixedPoint | None:
        if self._alone:
            return self._by_turns(budget, each)
        load = self.task.load
        work = chunks(each, budget // self._halves, load.prompt, load.output)
        decode = self._decode(each) if work is not None and work.keeps_up else None
        if work is None or decode is None:
            return None
        chunk = SequenceClass(work.size, load.cached + work.past, 1, work.prompts)
        step, end = (
            str(step_of([SequenceClass(1, context, 1, each), chunk]))
            for context in (load.context, load.last)
        )
        asked = self._options.changed(step=step)
        mixed = self._step(asked, decode.sequences, reserved=self._reserved(asked, step=end))
        if mixed is None:
            return None
        first = mixed.seconds
        if self._coupled > 1:
            part = replace(chunk, new=-(-work.size // self._coupled))
            few = str(step_of([SequenceClass(1, load.context, 1, each), part]))
            other = self._step(self._options.changed(step=few), decode.sequences)
            if other is None:
                return None
            one = max(mixed.seconds - max(0.0, mixed.shared - other.shared), other.seconds)
            share, mean, first = among_groups(work.share, self._coupled, mixed.seconds, one)
            work, mixed = replace(work, share=share), mixed.lasting(mean)
        prompts = work.prompts * self._groups * self._stages
        passes = chunks_pass((work.steps - 1) * first, first, self._stages)
        pods = self._pod(decode), self._pod(mixed, prompts, passes)
        rates = chunked(*pods, work, load.output, stages=self._stages)
        return MixedPoint(decode, mixed, budget, work, rates, load.output)

    def _by_turns(self, budget: int, each: int) -> MixedPoint | None:
        """Steps that decode, alternating with steps that have a chunk of a prompt of each group
        alone, for which sequences that decode wait."""
        load, decode = self.task.load, self._decode(each)
        step = {"serve": PREFILL, "batch": self._groups}
        prompts, passes = None, 0.0
        for start in range(0, load.prompt, budget) if decode is not None else ():
            chunk = {"prompt": min(budget, load.prompt - start), "context": load.cached + start}
            sequences = self._groups * self._stages
            point = self._step(self._options.changed(**step, **chunk), sequences)
            if point is None:
                return None
            before = 0.0 if prompts is None else prompts.seconds
            passes = chunks_pass(before, point.seconds, self._stages)
            prompts = point if prompts is None else _together(prompts, point)
        if decode is None or prompts is None:
            return None
        if not self._fits(_together(decode, prompts).stages):
            return None
        one, lone = self._pod(prompts, passes=passes), self._lone_share
        steady = colocated(one, self._pod(decode), load.output, stages=self._stages, lone=lone)
        steps = -(-load.prompt // budget)
        share, mean, _ = turns_of(one, self._pod(decode), load.output, lone)
        mixed = _together(decode, prompts.lasting(mean))
        work = PromptChunks(steps, -(-load.prompt // steps), 1, share)
        return MixedPoint(decode, mixed, budget, work, steady, load.output)

    def _pod(self, point: StepPoint, sequences: int = 0, passes: float = 0.0) -> PodStep:
        """A step in the form that `analysis.serving_rates` takes."""
        about = sequences or point.sequences, point.seconds, self._ranks
        return PodStep(*about, request=self._request, passes=passes)

    def _prefills(self) -> Iterator[StepPoint]:
        """Steps that prefill whole prompts: 1, 2, 4, ... of each group, as many as a step takes.
        Several pods send no caches, so they prefill for themselves alone."""
        load = self.task.load
        most = 0 if self._several else max(1, max(self._budgets) // load.prompt)
        step = {"prompt": load.prompt, "context": load.cached or None}
        each = 1
        while each <= most:
            batch = each * self._groups
            asked = self._options.changed(serve=PREFILL, batch=batch, **step)
            prefill_point = self._step(asked, batch * self._stages, sends=batch)
            if prefill_point is None:
                return
            yield prefill_point
            each *= 2

    def _reserved(self, asked: JobOptions, **last: Any) -> JobOptions | None:
        """The step in which sequences have all their tokens, if the engine reserves memory for
        it."""
        return asked.changed(**last) if self._scheduler.reserve else None

    def _step(
        self,
        asked: JobOptions,
        sequences: int,
        *,
        sends: int = 0,
        gives: float = 1.0,
        reserved: JobOptions | None = None,
    ) -> StepPoint | None:
        """Time a step, by each of the `gives` tokens that it generates for a sequence. None if it,
        or the `reserved` step, does not fit. Every stage has caches for the sequences in flight on
        all stages; those of the compiled step are the sequences of one. With `sends` prompts the
        bytes of a prompt's caches are set."""
        job = job_costs(asked, Session())
        last = job if reserved is None else job_costs(reserved, Session())
        by_stage = [stage for pod in last.figures().each for stage in pod.by_stage]
        caches = [each.get(CACHES, 0) for each in by_stage]
        stages = [
            (sum(each.values()) - kept, kept * self._stages)
            for each, kept in zip(by_stage, caches, strict=True)
        ]
        if not self._fits(stages):
            return None
        report = self._timer.time(job)
        self._request = report.step.request / PICOSECONDS
        self._cautions |= dict.fromkeys(report.cautions)
        if sends:
            self._cached = max(caches) / sends
        step = grouped(report.breakdown, {}), report.step_seconds, self._stages
        parts, seconds = steady_parts(*step), steady_seconds(*step)
        each = (seconds / gives, report.step_seconds / gives)
        shared = shared_seconds(report) if asked.serve == MIXED and self._coupled > 1 else 0.0
        return StepPoint(sequences, *each, per_token(parts, 1 / gives), stages, shared)

    def _fits(self, stages: Sequence[tuple[int, int]]) -> bool:
        """Whether the memory of a rank of each stage, or of each pod, fits its machine."""
        rooms = self._rooms if self._several else self._rooms * len(stages)
        return all(sum(each) <= room for each, room in zip(stages, rooms, strict=True))


def _together(first: StepPoint, then: StepPoint) -> StepPoint:
    """Two consecutive steps as one, with the caches of both in memory. Its sequences are those of
    the first one, which include those of the second one."""
    names = dict.fromkeys((*first.parts, *then.parts))
    parts = {n: first.parts.get(n, 0.0) + then.parts.get(n, 0.0) for n in names}
    pairs = zip(first.stages, then.stages, strict=True)
    stages = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in pairs]
    seconds = first.seconds + then.seconds, first.passes + then.passes
    return StepPoint(first.sequences, *seconds, parts, stages)


def _climbed(
    at: Callable[[int], P | None], is_late: Callable[[P], bool], wanted: Sequence[int] | None
) -> Iterator[P]:
    """Points at batches 1, 2, 4, ... as long as they exist, or at the `wanted` batches. Without
    `wanted` also, by bisection, close to the largest batch that exists, and to the largest that is
    not late."""
    points: dict[int, P] = {}
    for each in wanted or [1 << power for power in range(_MOST.bit_length())]:
        point = at(each)
        if point is not None:
            points[each] = point
        elif wanted is None:
            break
    if wanted is None and points:
        last = max(points)
        if last < _MOST:
            _between(last, 2 * last, at, lambda p: False, points)
        if is_late(points[max(points)]):
            for low, high in pairwise(sorted(points)):
                if is_late(points[high]) and not is_late(points[low]):
                    _between(low, high, at, is_late, points)
                    break
    yield from (points[each] for each in sorted(points))


def _between(
    low: int,
    high: int,
    at: Callable[[int], P | None],
    is_late: Callable[[P], bool],
    points: dict[int, P],
) -> None:
    """Bisect between two batches for the largest one that exists and is not late; `low` is one."""
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        if middle == low:
            return
        point = points.get(middle) or at(middle)
        if point is not None:
            points[middle] = point
        if point is None or is_late(point):
            high = middle
        else:
            low = middle
