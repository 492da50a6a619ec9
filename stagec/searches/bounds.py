"""Lower bounds of the jobs of a search: of all jobs at once by few probes, then tighter ones, step
by step, for jobs that may be among the best.

    all jobs   the work of a microbatch without recomputation; parameters and their state as far as
               no data-parallel ranks share them
    step 0     the static memory
    step 1     the work of a microbatch with recomputation
    step 2     the work with the communication of each microbatch, if any, and a pipeline's actions
               one after the other
    step 3     the memory of the stages of a pipeline
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from stagec.ir.module import BATCH
from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.jobs.legal import count_of, size_of
from stagec.jobs.request.options import JobOptions
from stagec.machines import Machine
from stagec.searches.explore.bounds import (
    SLACK,
    Floats,
    MemoryParts,
    Work,
    columns,
    memory_bound,
    time_bound,
)
from stagec.searches.explore.layout import Layers, StepLayout, layer_layout, rank_layers
from stagec.searches.explore.pipelined import ActionTimes, Pair, PipelineBound, pipelined
from stagec.searches.points import Ints, Jobs
from stagec.searches.probes import (
    BETWEEN,
    FOUR_STAGES,
    RECOMPUTED,
    STATE,
    Asked,
    Probe,
    What,
    of_work,
    parts_of,
    refined_probe,
    shared_state_probe,
    stages_probe,
    state_probe,
    work_probe,
)

#: Makes probes, in order.
Probing = Callable[[Sequence[Asked]], Sequence[Probe]]
#: The fields of probes of work that bounds use, in the order of `Work` and `MemoryParts`.
_WORK = (
    *("layer", "rest", "head", "cut", "back", "link", "pace", "turn", "forward", "again"),
    *("stash", "more"),
)
#: The memory of the stages of a pipeline is probed if the bound so far is at least this share of
#: the room of a rank; the second share holds where a rank has whole gradients or parameters of a
#: layer for a time.
_CLOSE, _CLOSE_WITH_WHOLE = 0.9, 0.5
#: Stands for the bytes of a job that is the same as one before it.
SAME = -1.0
#: A probe of a job: its kind, the number of the job, and the probe.
_Named: TypeAlias = tuple[str, int, Asked]
_Probed: TypeAlias = Mapping[tuple[str, int], Probe]
_Ask: TypeAlias = Callable[[int], Iterator[_Named]]
_Take: TypeAlias = Callable[[Sequence[int], _Probed], None]


class JobBounds:
    """Lower bounds of the step times (`seconds`) and peaks (`memory`, bytes) of jobs, by number.

    `refused` has, for each job, why the compiler refuses its probe; empty if it does not.
    `array_seconds` is the CPU time of the first bounds without probes. The memory of the stages of
    a pipeline is not probed if its bound is far below `room` bytes.
    """

    def __init__(
        self,
        jobs: Jobs,
        layers: Layers,
        sizes: Mapping[str, int],
        machine: Machine,
        probing: Probing,
        *,
        overlap: bool = True,
        room: float = 0.0,
    ) -> None:
        self._jobs, self._layers, self._sizes = jobs, layers, sizes
        self._machine, self._overlap, self._probing = machine, overlap, probing
        self._room = room
        self._stage: defaultdict[int, int] = defaultdict(int)
        self._work: dict[int, Probe] = {}
        self._state: dict[int, Probe] = {}
        self.array_seconds = 0.0
        self.seconds, self.memory = self._first()

    # -- all at once -------------------------------------------------------------------------------

    def _first(self) -> tuple[Floats, Floats]:
        jobs, least, keeps = self._jobs, dict[str, str](), self._keeps
        named = of_work(jobs.names)
        if "recompute" in jobs.differing():
            named, least = named - {"recompute", *RECOMPUTED}, {"recompute": "none"}
            keeps = keeps * self._is("recompute", "none")
        group, first = jobs.groups(named, [self._batches])
        wanted = (work_probe(jobs[n].changed(**least), self._sizes) for n in first)
        probes = self._probing([*map(self._asked, wanted)])
        self.refused: list[str] = [probes[int(i)].refused for i in group]
        every, _ = np.arange(len(jobs)), self._layer_layout
        began = time.process_time()
        own = np.array([p.own for p in probes], dtype=np.float64).reshape(-1, 3)[group]
        unshared: Floats = (own * self._unshared).sum(axis=1)
        bounds = self._of(every, probes, group, unshared, np.zeros(len(jobs)), keeps)
        self._least, self._least_keeps = [probes[int(i)] for i in group], keeps
        self.array_seconds = time.process_time() - began
        return bounds

    def _of(
        self,
        rows: Ints,
        works: Sequence[Probe],
        work: Ints,
        static: Floats,
        state: Floats,
        keeps: Floats,
    ) -> tuple[Floats, Floats]:
        """Bounds of the jobs `rows`: `work` has the number of the probe of each in `works`,
        `static` and `state` are bytes of its state; `keeps` is 0 for jobs whose probes say nothing
        about the activations of a microbatch, else 1."""
        shape = StepLayout(*self._layouts[:, self._layout[rows]])
        table = np.array([[getattr(p, n) for p in works] for n in _WORK], dtype=np.float64)
        by_job = table.reshape(len(_WORK), -1)[:, work]
        stash, more = by_job[-2:] * keeps
        memory = MemoryParts(static, stash, more, state)
        return time_bound(Work(*by_job[:-2]), shape), memory_bound(memory, shape)

    def _asked(self, options: JobOptions, what: What = "work") -> Asked:
        return Asked(options, self._machine, self._layers, what, self._overlap)

    # -- one by one --------------------------------------------------------------------------------

    def refine(self, numbers: Iterable[int]) -> list[int]:
        """Take the next step of bounds for these jobs. Returns those that had one. A job that turns
        out to be the same as one before it gets `SAME` bytes."""
        refined = [n for n in numbers if self.memory[n] != SAME and self._has_better(n)]
        steps = [
            (ask, take, [n for n in refined if self._stage[n] == stage])
            for stage, (ask, take) in enumerate(self._steps)
        ]
        asked = {
            (what, n): probe
            for ask, _, jobs in steps
            for number in jobs
            for what, n, probe in ask(number)
        }
        probed = dict(zip(asked, self._probing([*asked.values()]), strict=True))
        for _, take, jobs in steps:
            take(jobs, probed)
        for number in refined:
            self._stage[number] += 1
        return refined

    def _has_better(self, number: int) -> bool:
        """Whether a job has a next step of bounds."""
        match self._stage[number]:
            case 0 | 1:
                return True
            case 2:
                return self._is_piped(number) or self._jobs[number].zero >= 2
            case 3:
                close = _CLOSE_WITH_WHOLE if self._jobs[number].zero >= 2 else _CLOSE
                return self._is_piped(number) and bool(self.memory[number] >= close * self._room)
            case _:
                return False

    def _ask_state(self, number: int) -> Iterator[_Named]:
        """The probe of the state of a job."""
        yield "state", number, self._asked(shared_state_probe(self._jobs[number]), "state")

    def _ask_work(self, number: int) -> Iterator[_Named]:
        """Probes, not known yet, of the work of a job and of the jobs before it that differ in
        recomputation alone."""
        for kin in (k for k in self._kin(number) if k <= number and k not in self._work):
            yield "work", kin, self._asked(work_probe(self._jobs[kin], self._sizes))

    def _ask_exchanged(self, number: int) -> Iterator[_Named]:
        """The probe of the communication of each microbatch, if there is any, and that of the end
        of a pipeline's step."""
        job = self._jobs[number]
        refined = refined_probe(job, self._sizes)
        if refined is not None:
            yield "exchanged", number, self._asked(refined)
        if self._is_piped(number):
            yield "tail", number, self._asked(state_probe(job), "tail")

    def _ask_stages(self, number: int) -> Iterator[_Named]:
        """The probe of the memory of the stages of a pipeline."""
        probe = stages_probe(self._jobs[number], self._sizes, self._layers)
        yield "stages", number, self._asked(probe, "stages")

    def _take_state(self, numbers: Sequence[int], probed: _Probed) -> None:
        for number in numbers:
            state = probed["state", number]
            self._state[number] = state
            self.refused[number] = self.refused[number] or state.refused
        self._improve({n: self._least[n] for n in numbers}, self._least_keeps)

    def _take_work(self, numbers: Sequence[int], probed: _Probed) -> None:
        self._work |= {n: probe for (what, n), probe in probed.items() if what == "work"}
        self._improve({n: self._work[n] for n in numbers}, self._keeps)
        for number in numbers:
            self.refused[number] = self.refused[number] or self._work[number].refused
        for number in filter(self._is_another, numbers):
            self.memory[number] = SAME

    def _take_exchanged(self, numbers: Sequence[int], probed: _Probed) -> None:
        exchanged = {n: probed["exchanged", n] for n in numbers if ("exchanged", n) in probed}
        for number in (n for n in exchanged if self._is_piped(n)):
            # parameters that stay gathered are kept once, not for each microbatch
            stash = min(exchanged[number].stash, self._work[number].stash)
            exchanged[number] = replace(exchanged[number], stash=stash)
        self._improve(exchanged, self._keeps)
        for number in filter(self._is_piped, numbers):
            times = exchanged[number].times if number in exchanged else None
            self._follow(number, times, probed["tail", number].tail)

    def _take_stages(self, numbers: Sequence[int], probed: _Probed) -> None:
        for number in numbers:
            memory = self._stage_memory(number, probed["stages", number])
            self.memory[number] = max(self.memory[number], SLACK * memory)

    @property
    def _steps(self) -> Sequence[tuple[_Ask, _Take]]:
        """For each step, the function that names the probes of a job, and the one that takes
        them."""
        return (
            (self._ask_state, self._take_state),
            (self._ask_work, self._take_work),
            (self._ask_exchanged, self._take_exchanged),
            (self._ask_stages, self._take_stages),
        )

    def _follow(self, number: int, other: ActionTimes | None, tail: float) -> None:
        """Raise the bound of the time of a pipeline by its actions one after the other."""
        work, job = self._work[number], self._jobs[number]
        if work.times is not None:
            times = work.times.exchanging(other, tail)
            ready = Pair(*(phase.border if phase else 0.0 for phase in work.times.phases))
            seconds = pipelined(self._layers, PipelineBound(*_shape(job)), times, ready, work.again)
            self.seconds[number] = max(self.seconds[number], SLACK * seconds)

    def _stage_memory(self, number: int, probe: Probe) -> float:
        """A lower bound of the peak of a pipeline's ranks in bytes, by a probe of four stages: the
        bytes of both ends in addition to layers, and those that a backward of layers needs in
        addition to the activations."""
        each, stash = self._state[number].static, self._work[number].stash * self._keeps[number]
        if self._layers.mixed or not (each and any(probe.ends)):
            return 0.0
        known = replace(self._layers, many=sum(BETWEEN))
        head, few, many, tail = rank_layers(known, *FOUR_STAGES, parts_of(self._layers))
        memory = zip(probe.ends, (head, tail), strict=True)
        first, last = (max(0.0, static - rank.own * each) for static, rank in memory)
        one, other = probe.beside[0] - few.kept * stash, probe.beside[1] - many.kept * stash
        # the same for any number of layers: it is in memory when the first of them begins
        beside = max(0.0, one) if stash and round(one) == round(other) else 0.0
        ranks = rank_layers(self._layers, *_shape(self._jobs[number]))
        least = self._together(number)
        bounds = (
            rank.own * each
            + rank.kept * stash
            + max(rank.first * first, rank.last * last)  # tied parameters may be in both
            + (rank.begins >= least) * beside
            for rank in ranks
        )
        return float(max(bounds))

    def _together(self, number: int) -> int:
        """The number of layers of which a rank has gathered parameters or unreduced gradients at
        once."""
        job = self._jobs[number]
        return 1 + max(1, job.fsdp_prefetch) if job.zero >= 2 else 1

    def _is_piped(self, number: int) -> bool:
        return size_of(self._jobs[number], "pp") > 1

    def settle(self, numbers: Sequence[int]) -> None:
        """Take all steps of bounds for these jobs."""
        while self.refine(numbers):
            pass

    def _improve(self, works: Mapping[int, Probe], keeps: Floats) -> None:
        """Raise the bounds of jobs by these probes of their work, given by number of the job;
        `keeps` is as in `_of`, for all jobs."""
        if not works:
            return
        rows, own = np.array([*works], dtype=np.int64), np.arange(len(works))
        states = [self._state[n] for n in works]
        static, state = np.array([(s.static, s.state) for s in states], dtype=np.float64).T
        seconds, memory = self._of(rows, [*works.values()], own, static, state, keeps[rows])
        self.seconds[rows] = np.maximum(self.seconds[rows], seconds)
        self.memory[rows] = np.maximum(self.memory[rows], memory)

    def _is_another(self, number: int) -> bool:
        """Whether the probe of this job equals that of an earlier one that differs in recomputation
        alone: where attention is one kernel, selective recomputation does nothing."""
        work = self._work[number]
        return (
            not work.refused
            and work != Probe()
            and any(self._work[n] == work for n in self._kin(number) if n < number)
        )

    def _kin(self, number: int) -> Sequence[int]:
        return self._kins[int(self._kin_of[number])]

    # -- groups ------------------------------------------------------------------------------------

    @cached_property
    def _kin_of(self) -> Ints:
        return self._jobs.groups({*self._jobs.names} - {"recompute"})[0]

    @cached_property
    def _kins(self) -> Mapping[int, Sequence[int]]:
        kins: defaultdict[int, list[int]] = defaultdict(list)
        for number, kin in enumerate(self._kin_of.tolist()):
            kins[kin].append(number)
        return kins

    @cached_property
    def _counts(self) -> Ints:
        stages, given = self._jobs.numbers("pp"), self._jobs.numbers("microbatches")
        return np.where(given > 0, given, np.where(stages > 1, 2 * stages, 1))

    @cached_property
    def _batches(self) -> Ints:
        """Sequences of a microbatch on a rank."""
        ranks = self._counts
        for axis in DATA_AXES:
            ranks = ranks * self._jobs.numbers(axis)
        return self._sizes[BATCH] // np.maximum(ranks, 1)

    @cached_property
    def _keeps(self) -> Floats:
        """0 for jobs whose layers differ in recomputation, and for those that cast gradients before
        they shard them, since a probe shards none and so has all casts; else 1."""
        jobs = self._jobs
        some = sum((jobs.numbers(n) for n in RECOMPUTED), np.zeros(len(jobs)))
        types = zip(jobs.values("grad_dtype"), jobs.values("reduce_dtype"), strict=True)
        casts = np.array([grad != reduced for grad, reduced in types], dtype=bool)
        return np.where((some > 0) | (casts & (jobs.numbers("zero") >= 2)), 0.0, 1.0)

    @cached_property
    def _unshared(self) -> Floats:
        """For each job three numbers, for parameters, gradients and the state of the optimizer: 1
        if each rank has all of them on the device, else 0."""
        stage, ahead = self._jobs.numbers("zero"), self._jobs.numbers("overlap_param_gather")
        away = np.array([STATE in str(text) for text in self._jobs.values("offload")])
        own = (stage < 3) & (ahead == 0), stage < 2, (stage < 1) & ~away
        return np.array(own, dtype=np.float64).T

    def _is(self, name: str, value: str) -> Floats:
        """1 for jobs in which a flag has this value, else 0."""
        return np.array([v == value for v in self._jobs.values(name)], dtype=np.float64)

    @cached_property
    def _layer_layout(self) -> tuple[Ints, Floats]:
        names = ("pp", "schedule", "chunks", "stage_layers")
        group, first = self._jobs.groups(names, [self._counts])
        return group, columns([_layout(self._jobs[n], self._layers) for n in first])

    @property
    def _layout(self) -> Ints:
        return self._layer_layout[0]

    @property
    def _layouts(self) -> Floats:
        return self._layer_layout[1]


def _layout(job: JobOptions, layers: Layers) -> StepLayout:
    return layer_layout(layers, *_shape(job))


def _shape(job: JobOptions) -> tuple[str, int, int, int, tuple[int, ...]]:
    """The schedule of a job, its stages, microbatches and chunks, and the layers of each stage."""
    return job.schedule, size_of(job, "pp"), count_of(job), job.chunks, job.stage_layers
