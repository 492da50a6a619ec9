"""Lower bounds of the jobs of a search: all at once by few probes, better ones for those that come
up.

    first     the work of a microbatch in which nothing is computed again; no parameters are held
    then      the work as it is, and what stays in memory
    at last   the work with what is exchanged for each microbatch, where that is something; the
              actions of a pipeline, one after the other, and what its two ends hold
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from stagec.driver.job.legal import count_of, size_of
from stagec.driver.request.options import JobOptions
from stagec.driver.search.listed import Ints, Jobs
from stagec.driver.search.probes import (
    FEW,
    RECOMPUTED,
    TWO_STAGES,
    Asked,
    Probe,
    What,
    ends_probe,
    of_work,
    refined_probe,
    state_probe,
    work_probe,
)
from stagec.explore.bounds import SLACK, Floats, Held, Work, columns, memory_bound, time_bound
from stagec.explore.layout import Layers, StepLayout, laid_out, rank_layers
from stagec.explore.pipelined import ActionTimes, Pair, PipelineBound, pipelined
from stagec.ir.module import BATCH
from stagec.ir_spec.ops.axes import DATA_AXES
from stagec.machines import Machine

#: Makes probes, in order.
Probing = Callable[[Sequence[Asked]], Sequence[Probe]]
#: What the bounds take of probes of work, in the order of `Work` and `Held`.
_WORK = ("layer", "rest", "head", "cut", "back", "link", "again", "stash", "more")
#: Of the room of a rank, what the bound of a pipeline is at least if it may be above it when it is
#: as good as it gets.
_CLOSE = 0.9
#: The job is the same as one before it.
SAME = -1.0


class JobBounds:
    """Bounds of the seconds and of the bytes of jobs of a model of these layers and sizes.
    `refused` says of each job why the compiler makes no probe of it, `array_seconds` is what the
    bounds of all took, without the probes. Of pipelines that hold much less than `room` it is not
    asked how much it is."""

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
        self.seconds, self.held = self._first()

    # -- all at once -------------------------------------------------------------------------------

    def _first(self) -> tuple[Floats, Floats]:
        jobs, least, keeps = self._jobs, dict[str, str](), self._keeps
        named = of_work(jobs.names)
        if "recompute" in jobs.differing():
            named, least = named - {"recompute", *RECOMPUTED}, {"recompute": "none"}
            keeps = keeps * self._is("recompute", "none")
        group, first = jobs.alike(named, [self._batches])
        wanted = (work_probe(jobs[n].changed(**least), self._sizes) for n in first)
        probes = self._probing([*map(self._asked, wanted)])
        self.refused: list[str] = [probes[int(i)].refused for i in group]
        every, _ = np.arange(len(jobs)), self._laid_out
        began = time.process_time()
        found = self._of(every, probes, group, [Probe()] * len(jobs), keeps)
        self.array_seconds = time.process_time() - began
        return found

    def _of(
        self,
        rows: Ints,
        works: Sequence[Probe],
        work: Ints,
        states: Sequence[Probe],
        keeps: Floats,
    ) -> tuple[Floats, Floats]:
        """Bounds of some jobs, each with its probes of work and of state; `keeps` is 0 for those of
        whose probes nothing follows for what is kept of a microbatch, else 1."""
        shape = StepLayout(*self._layouts[:, self._layout[rows]])
        table = np.array([[getattr(p, n) for p in works] for n in _WORK], dtype=np.float64)
        mine = table.reshape(len(_WORK), -1)[:, work]
        static, state = np.array([(s.static, s.state) for s in states], dtype=np.float64).T
        stash, more = mine[-2:] * keeps
        held = Held(static, stash, more, state)
        return time_bound(Work(*mine[:-2]), shape), memory_bound(held, shape)

    def _asked(self, options: JobOptions, what: What = "work") -> Asked:
        return Asked(options, self._machine, self._layers, what, self._overlap)

    # -- one by one --------------------------------------------------------------------------------

    def refine(self, numbers: Iterable[int]) -> list[int]:
        """Make the bounds of some jobs better; those for which that was possible. Those that are
        the same as a job before them hold `SAME` bytes."""
        new = [n for n in numbers if self.held[n] != SAME]
        first, second = ([n for n in new if self._stage[n] == stage] for stage in (0, 1))
        last = [n for n in second if self._is_piped(n) or self._jobs[n].zero >= 2]
        asked = {(what, n): a for n in first for what, n, a in self._asked_first(n)}
        asked |= {(what, n): a for n in last for what, a in self._asked_last(n)}
        found = dict(zip(asked, self._probing([*asked.values()]), strict=True))
        for number in (*first, *second):
            self._stage[number] += 1
        self._work |= {n: probe for (what, n), probe in found.items() if what == "work"}
        for number in first:
            state = found["state", number]
            self._state[number] = state
            self.refused[number] = self.refused[number] or state.refused
        exchanged = {n: probe for (what, n), probe in found.items() if what == "exchanged"}
        self._improve({n: self._work[n] for n in first} | exchanged)
        for number in (n for n in last if self._is_piped(n)):
            other = exchanged.get(number, Probe()).times
            self._follow(number, other, found["tail", number].tail)
            held = self._held(number, found.get(("ends", number), Probe()))
            self.held[number] = max(self.held[number], SLACK * held)
        for number in first:
            if self._is_another(number):
                self.held[number] = SAME
        return [*first, *last]

    def _asked_first(self, number: int) -> Iterator[tuple[str, int, Asked]]:
        """Probes of the work and of the state of a job, and of the work of those before it that
        differ in what is computed again alone."""
        for kin in (k for k in self._kin(number) if k <= number):
            yield "work", kin, self._asked(work_probe(self._jobs[kin], self._sizes))
        yield "state", number, self._asked(state_probe(self._jobs[number]), "state")

    def _asked_last(self, number: int) -> Iterator[tuple[str, Asked]]:
        """Probes of what is exchanged for each microbatch, where that is something, and of what a
        pipeline does at its end and holds at both ends."""
        job = self._jobs[number]
        refined = refined_probe(job, self._sizes)
        if refined is not None:
            yield "exchanged", self._asked(refined)
        if self._is_piped(number):
            yield "tail", self._asked(state_probe(job), "tail")
            if self.held[number] >= _CLOSE * self._room:
                yield "ends", self._asked(ends_probe(job, self._sizes), "ends")

    def _follow(self, number: int, other: ActionTimes | None, tail: float) -> None:
        """A better bound of a pipeline, by its actions one after the other."""
        mine, job = self._work[number], self._jobs[number]
        if mine.times is not None:
            times = mine.times.exchanging(other, tail)
            ready = Pair(*(phase.border if phase else 0.0 for phase in mine.times.phases))
            seconds = pipelined(self._layers, PipelineBound(*_shape(job)), times, ready, mine.again)
            self.seconds[number] = max(self.seconds[number], SLACK * seconds)

    def _held(self, number: int, end: Probe) -> float:
        """Bytes that a rank of a pipeline holds at least, by a probe of two stages: what its ends
        hold beside layers, and what a backward of the first needs beside all that is kept."""
        each, stash = self._state[number].static, self._work[number].stash * self._keeps[number]
        if self._layers.mixed or not (each and any(end.ends)):
            return 0.0
        few, many = (rank_layers(replace(self._layers, many=2 * n), *TWO_STAGES, ()) for n in FEW)
        held = zip(end.ends, few, strict=True)
        first, last = (max(0.0, static - rank.own * each) for static, rank in held)
        one, other = end.beside[0] - few[0].kept * stash, end.beside[1] - many[0].kept * stash
        # the same for any number of layers: it is there when the first of them begins; parameters
        # that are gathered ahead are those of further layers, of which a chunk may have none
        told = stash and round(one) == round(other) and self._jobs[number].zero < 3
        beside = max(0.0, one) if told else 0.0
        ranks = rank_layers(self._layers, *_shape(self._jobs[number]))
        bounds = (
            rank.own * each
            + rank.kept * stash
            + max(rank.first * first, rank.last * last)  # both may hold the same, if tied
            + rank.begins * beside
            for rank in ranks
        )
        return float(max(bounds))

    def _is_piped(self, number: int) -> bool:
        return size_of(self._jobs[number], "pp") > 1

    def settle(self, numbers: Sequence[int]) -> None:
        """Make the bounds of some jobs as good as they get."""
        while self.refine(numbers):
            pass

    def _improve(self, works: Mapping[int, Probe]) -> None:
        """Better bounds of jobs by these probes of their work."""
        if not works:
            return
        rows, own = np.array([*works], dtype=np.int64), np.arange(len(works))
        states = [self._state[n] for n in works]
        seconds, held = self._of(rows, [*works.values()], own, states, self._keeps[rows])
        self.seconds[rows] = np.maximum(self.seconds[rows], seconds)
        self.held[rows] = np.maximum(self.held[rows], held)

    def _is_another(self, number: int) -> bool:
        """Whether a job before this one differs from it in what is recomputed, and by its probe in
        nothing that it does: where attention is one kernel, selective is none."""
        mine = self._work[number]
        return (
            not mine.refused
            and mine != Probe()
            and any(self._work[n] == mine for n in self._kin(number) if n < number)
        )

    def _kin(self, number: int) -> Sequence[int]:
        return self._kins[int(self._kin_of[number])]

    # -- groups ------------------------------------------------------------------------------------

    @cached_property
    def _kin_of(self) -> Ints:
        return self._jobs.alike({*self._jobs.names} - {"recompute"})[0]

    @cached_property
    def _kins(self) -> Mapping[int, Sequence[int]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for number, kin in enumerate(self._kin_of.tolist()):
            found[kin].append(number)
        return found

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
        """0 for jobs whose layers differ in what is computed again, else 1."""
        some = sum((self._jobs.numbers(n) for n in RECOMPUTED), np.zeros(len(self._jobs)))
        return np.where(some > 0, 0.0, 1.0)

    def _is(self, name: str, value: str) -> Floats:
        """1 for jobs of which a flag has this value, else 0."""
        at = self._jobs.names.index(name)
        return np.array([row[at] == value for row in self._jobs.rows], dtype=np.float64)

    @cached_property
    def _laid_out(self) -> tuple[Ints, Floats]:
        names = ("pp", "schedule", "chunks", "stage_layers")
        group, first = self._jobs.alike(names, [self._counts])
        return group, columns([_layout(self._jobs[n], self._layers) for n in first])

    @property
    def _layout(self) -> Ints:
        return self._laid_out[0]

    @property
    def _layouts(self) -> Floats:
        return self._laid_out[1]


def _layout(job: JobOptions, layers: Layers) -> StepLayout:
    return laid_out(layers, *_shape(job))


def _shape(job: JobOptions) -> tuple[str, int, int, int, tuple[int, ...]]:
    """The schedule of a job, its stages, microbatches and chunks, and the layers of its parts."""
    return job.schedule, size_of(job, "pp"), count_of(job), job.chunks, job.stage_layers
