"""Lower bounds of the jobs of a search: all at once by few probes, better ones for those that come
up.

    first     the work of a microbatch in which nothing is computed again; no parameters are held
    then      the work as it is, and what stays in memory
    at last   the work with what is exchanged for each microbatch, where that is something; the
              actions of a pipeline, one after the other
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from stagec.driver.job.legal import BATCH, count_of, size_of
from stagec.driver.request.options import JobOptions
from stagec.driver.search.listed import Ints, Jobs
from stagec.driver.search.probes import (
    RECOMPUTED,
    Asked,
    Probe,
    What,
    of_work,
    refined_probe,
    state_probe,
    work_probe,
)
from stagec.explore.bounds import SLACK, Floats, Held, Work, columns, memory_bound, time_bound
from stagec.explore.layout import Layers, StepLayout, laid_out
from stagec.explore.pipelined import Pair, PipelineBound, pipelined
from stagec.ir_spec.ops.axes import DATA_AXES
from stagec.machines import Machine

#: Makes probes, in order.
Probing = Callable[[Sequence[Asked]], Sequence[Probe]]
#: What the bounds take of probes of work, in the order of `Work` and `Held`.
_WORK = ("layer", "rest", "head", "cut", "back", "link", "again", "stash", "more")
#: The job is the same as one before it.
SAME = -1.0


class JobBounds:
    """Bounds of the seconds and of the bytes of jobs of a model of these layers and sizes.
    `refused` says of each job why the compiler makes no probe of it, `array_seconds` is what the
    bounds of all took, without the probes."""

    def __init__(
        self,
        jobs: Jobs,
        layers: Layers,
        sizes: Mapping[str, int],
        machine: Machine,
        probing: Probing,
        *,
        overlap: bool = True,
    ) -> None:
        self._jobs, self._layers, self._sizes = jobs, layers, sizes
        self._machine, self._overlap, self._probing = machine, overlap, probing
        self._stage: defaultdict[int, int] = defaultdict(int)
        self._work: dict[int, Probe] = {}
        self._static: dict[int, float] = {}
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
        wanted = [work_probe(jobs[n].changed(**least), self._sizes) for n in first]
        probes = self._probed(wanted)
        self.refused: list[str] = [probes[int(i)].refused for i in group]
        every, _ = np.arange(len(jobs)), self._laid_out
        began = time.process_time()
        found = self._of(every, probes, group, np.zeros(len(jobs)), keeps)
        self.array_seconds = time.process_time() - began
        return found

    def _of(
        self, rows: Ints, works: Sequence[Probe], work: Ints, static: Floats, keeps: Floats
    ) -> tuple[Floats, Floats]:
        """Bounds of some jobs, each with its probe of work; `keeps` is 0 for those of whose probes
        nothing follows for what is kept of a microbatch, else 1."""
        shape = StepLayout(*self._layouts[:, self._layout[rows]])
        table = np.array([[getattr(p, n) for p in works] for n in _WORK], dtype=np.float64)
        mine = table.reshape(len(_WORK), -1)[:, work]
        kept = mine[-2:] * keeps
        return time_bound(Work(*mine[:-2]), shape), memory_bound(Held(static, *kept), shape)

    def _probed(self, options: Iterable[JobOptions], what: What = "work") -> Sequence[Probe]:
        about = self._machine, what, self._overlap, self._layers.before
        return self._probing([Asked(o, *about) for o in options])

    # -- one by one --------------------------------------------------------------------------------

    def refine(self, numbers: Iterable[int]) -> list[int]:
        """Make the bounds of some jobs better; those for which that was possible. Those that are
        the same as a job before them hold `SAME` bytes."""
        of_stage = [[n for n in numbers if self._stage[n] == stage] for stage in (0, 1)]
        last = [n for n in of_stage[1] if self._is_piped(n) or self._jobs[n].zero >= 2]
        exchanged = self._exchanged(last)
        self._ask(of_stage[0])
        for number in (*of_stage[0], *of_stage[1]):
            self._stage[number] += 1
        self._improve({n: self._work[n] for n in of_stage[0]} | exchanged)
        self._follow([n for n in last if self._is_piped(n)], exchanged)
        for number in of_stage[0]:
            if self._is_another(number):
                self.held[number] = SAME
        return [*of_stage[0], *last]

    def _exchanged(self, numbers: Iterable[int]) -> dict[int, Probe]:
        """Probes with what is exchanged for each microbatch, of jobs that exchange something."""
        asked = {n: refined_probe(self._jobs[n], self._sizes) for n in numbers}
        given = {n: options for n, options in asked.items() if options is not None}
        return dict(zip(given, self._probed(given.values()), strict=True))

    def _follow(self, numbers: Sequence[int], exchanged: Mapping[int, Probe]) -> None:
        """Better bounds of pipelines, by their actions one after the other."""
        tails = self._probed([state_probe(self._jobs[n]) for n in numbers], "tail")
        for number, tail in zip(numbers, tails, strict=True):
            mine = self._work[number]
            if mine.times is None:
                continue
            other = exchanged[number].times if number in exchanged else None
            times, job = mine.times.exchanging(other, tail.tail), self._jobs[number]
            ready = Pair(*(phase.border if phase else 0.0 for phase in mine.times.phases))
            about = job.schedule, size_of(job, "pp"), count_of(job), job.chunks, job.stage_layers
            seconds = pipelined(self._layers, PipelineBound(*about), times, ready, mine.again)
            self.seconds[number] = max(self.seconds[number], SLACK * seconds)

    def _is_piped(self, number: int) -> bool:
        return size_of(self._jobs[number], "pp") > 1

    def settle(self, numbers: Sequence[int]) -> None:
        """Make the bounds of some jobs as good as they get."""
        while self.refine(numbers):
            pass

    def _ask(self, numbers: Sequence[int]) -> None:
        """Probes of the work and of the state of jobs, and of those before them that differ in what
        is computed again alone."""
        asked = list(dict.fromkeys(k for n in numbers for k in self._kin(n) if k <= n))
        own = [work_probe(self._jobs[n], self._sizes) for n in asked]
        self._work |= dict(zip(asked, self._probed(own), strict=True))
        states = self._probed([state_probe(self._jobs[n]) for n in numbers], "state")
        for number, found in zip(numbers, states, strict=True):
            self._static[number] = found.static
            self.refused[number] = self.refused[number] or found.refused

    def _improve(self, works: Mapping[int, Probe]) -> None:
        """Better bounds of jobs by these probes of their work."""
        if not works:
            return
        rows, own = np.array([*works], dtype=np.int64), np.arange(len(works))
        static = np.array([self._static[n] for n in works], dtype=np.float64)
        seconds, held = self._of(rows, [*works.values()], own, static, self._keeps[rows])
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
    about = size_of(job, "pp"), count_of(job), job.chunks, job.stage_layers
    return laid_out(layers, job.schedule, *about)
