"""A search over one space on one machine: lists its points, bounds them, and evaluates the
promising ones."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagec.ir.module import BATCH
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.options import JobOptions
from stagec.machines import Machine
from stagec.searches.bounds import SAME, JobBounds
from stagec.searches.explore.bounds import Floats
from stagec.searches.explore.branch import Front, Ranked, Search
from stagec.searches.explore.layout import Layers
from stagec.searches.explore.space import Space
from stagec.searches.jobs import NOTHING, Evaluated, Probes, Run, Task
from stagec.searches.neighbours import neighbours_of
from stagec.searches.space import REFUSED, JobList, list_jobs
from stagec.serving.step import Step as ServingStep

#: Characters of a message of the compiler that distinguish it from others.
_LONG = 60


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a search: the best jobs of `base` on `ranks` ranks of a machine, within a
    memory limit.

    `sizes` are the sizes of all symbols of the model, `layers` its layers; `price` is the price of
    a rank for an hour. Steps of more than `most_seconds` are left out. `group` is the step of each
    group of ranks, for a mixed step, where strategies have any number of groups. `given` are the
    flags that the user gave values for; others have those of the default space. With several pods,
    `ranks`, `sizes` and `layers` are those of the main pod, and `other_ranks` counts the ranks of
    the others.
    """

    base: JobOptions
    sizes: Mapping[str, int]
    layers: Layers
    space: Space
    machine: Machine
    ranks: int
    limit: Limit | None
    objective: str = "time"
    wanted: int = 5
    overlap: bool = True
    measured: Any = None
    exhaustive: bool = False
    pareto: tuple[str, ...] = ()
    price: float | None = None
    most_seconds: float | None = None
    group: ServingStep | None = None
    given: frozenset[str] = frozenset()
    other_ranks: int = 0

    @property
    def all_ranks(self) -> int:
        """The number of ranks of all pods."""
        return self.ranks + self.other_ranks

    @property
    def batch(self) -> int:
        """The number of sequences of a step; for a mixed step, those of a group that get a
        token."""
        return self.sizes[BATCH] if self.group is None else self.group.sampled or 1

    def sampled(self, tokens: int | None) -> int | None:
        """The tokens of a step that count: all, or for a mixed step those that are sampled."""
        if self.group is None or tokens is None:
            return tokens
        return tokens // self.group.tokens * self.group.sampled

    def per_group(self, seconds: float, tokens: int | None) -> float:
        """Seconds of a step of `tokens` tokens. If groups of ranks have steps of their own, and the
        objective is not the time of the step, they are divided by the number of groups."""
        if self.group is None or self.objective == "time" or not tokens:
            return seconds
        return seconds * self.group.tokens / tokens

    def is_late(self, seconds: float) -> bool:
        """Whether a step exceeds the limit of its time."""
        return self.most_seconds is not None and seconds > self.most_seconds

    def objective_of(self, seconds: float, memory: float) -> float:
        """The objective, of which less is better, for seconds (of a group) and bytes. For given
        ranks and batch, the tokens per rank follow from the time."""
        if self.objective == "memory":
            return memory
        return self.cost(seconds) if self.objective == "cost" else seconds

    def value(self, point: Evaluated) -> float | None:
        """The objective of a job; None if it does not fit, or exceeds the limit of its time."""
        if point.seconds is None or self.is_late(point.seconds):
            return None
        return self.objective_of(self.per_group(point.seconds, point.tokens), point.peak)

    def second(self, point: Evaluated) -> float:
        """The value that ranks jobs with equal objectives: memory, or time; less is better."""
        return (point.seconds or 0.0) if self.objective == "memory" else point.peak

    def cost(self, seconds: float) -> float:
        """The cost of a step: rank-hours, times their price if that is known."""
        return seconds * self.all_ranks / 3600 * (self.price or 1.0)


@dataclass(slots=True)
class Answer:
    """The result of a search over one space; `cut` counts the points that were left out, by
    reason. `known` has the evaluated jobs by number, `bounds` the bounds of time and memory."""

    question: Question
    job_list: JobList
    best: list[Ranked[Evaluated]]
    evaluated: int = 0
    timed: int = 0
    proven: float = 0.0
    left: int = 0
    cut: Counter[str] = field(default_factory=Counter[str])
    known: dict[int, Evaluated | str] = field(default_factory=dict[int, "Evaluated | str"])
    interrupted: bool = False
    bounds: tuple[Floats, Floats] | None = None
    bound_seconds: float = 0.0
    seconds: float = 0.0

    def job(self, best: Ranked[Evaluated]) -> JobOptions:
        """The job of one of the best points."""
        return self.job_list.jobs[best.number]


#: Called with messages about the progress of a search.
Log = Callable[[str], None]


def search(question: Question, run: Run, at_a_time: int, log: Log) -> Answer:
    """The best jobs of a question. If it is interrupted, the answer has what is known so far.
    Raises `KeyboardInterrupt` if that comes while points are listed."""
    began = time.monotonic()
    log("listing the points")
    base = question.base.changed(ranks=question.ranks)
    space = list_jobs(question.space, base, question.sizes, question.layers.total)
    answer = Answer(question, space, [])
    if len(space.jobs):
        _Searching(question, answer, run, at_a_time, log).go()
    answer.seconds = time.monotonic() - began
    return answer


class _Searching:
    def __init__(
        self, question: Question, answer: Answer, run: Run, at_a_time: int, log: Log
    ) -> None:
        self._question, self._answer, self._run = question, answer, run
        self._at_a_time, self._log = at_a_time, log
        self._jobs = answer.job_list.jobs
        self._bounds: JobBounds | None = None
        self._began = time.monotonic()
        self._dropped = self._skipped = 0
        self._refused: set[str] = set()

    def go(self) -> None:
        """Bound all jobs, and evaluate the promising ones."""
        answer = self._answer
        try:
            bounds = self._first_bounds()
        except KeyboardInterrupt:
            answer.interrupted, answer.left = True, len(self._jobs)
            return
        search = self._front(bounds) if self._question.pareto else self._best(bounds)
        answer.best, answer.proven, answer.left = search.best, search.proven, search.left
        answer.evaluated = search.tried - self._skipped
        if self._bounds is not None and search.best and not answer.interrupted:
            sizes = self._question.sizes
            try:
                self._bounds.settle([*neighbours_of(self._jobs, search.best[0].number, sizes)])
            except KeyboardInterrupt:
                answer.interrupted = True
        if not answer.interrupted:
            better = "larger" if self._question.objective == "memory" else "slower"
            better = "beaten" if self._question.pareto else better
            answer.cut[f"{better} by its bound"] += len(bounds) - search.tried - self._dropped

    def _best(self, bounds: Mapping[int, float]) -> Search[Evaluated]:
        question = self._question
        search: Search[Evaluated] = Search(bounds, question.wanted, question.second)
        try:
            for tried in search.run(self._refine, self._evaluate, self._at_a_time):
                self._progress(tried, search.best, search.proven)
        except KeyboardInterrupt:
            self._answer.interrupted = True
        return search

    def _front(self, bounds: Mapping[int, float]) -> Front[Evaluated]:
        """The Pareto front of time and memory of the jobs that may fit."""
        seconds, memory = self._answer.bounds or (np.zeros(len(self._jobs)),) * 2
        respects = {"time": seconds, "memory": memory}
        names = [n for n in self._question.pareto if n in respects]
        front: Front[Evaluated] = Front(
            {n: tuple(float(respects[r][n]) for r in names) for n in bounds}
        )

        def evaluate(
            numbers: Sequence[int],
        ) -> Iterator[tuple[int, tuple[float, ...] | None, Evaluated]]:
            for number, value, evaluated in self._evaluate(numbers):
                values = {"time": evaluated.seconds or 0.0, "memory": float(evaluated.peak)}
                yield number, None if value is None else tuple(values[r] for r in names), evaluated

        try:
            for tried in front.run(evaluate, self._at_a_time):
                self._progress(tried, front.best[:1], front.proven)
        except KeyboardInterrupt:
            self._answer.interrupted = True
        return front

    # -- bounds ------------------------------------------------------------------------------------

    def _first_bounds(self) -> dict[int, float]:
        """Bounds of the objective of all jobs that may fit."""
        question, answer, every = self._question, self._answer, range(len(self._jobs))
        if question.exhaustive:
            return dict.fromkeys(every, 0.0)
        probes = Probes(self._run, self._log)
        about = self._jobs, question.layers, question.sizes, question.machine, probes
        memory_matters = question.objective == "memory" or question.pareto
        room = 0.0 if memory_matters else self._room({})
        bounds = self._bounds = JobBounds(*about, overlap=question.overlap, room=room)
        answer.bound_seconds, answer.bounds = bounds.array_seconds, (bounds.seconds, bounds.memory)
        if question.pareto:  # for all jobs the static memory and the work with recomputation
            bounds.refine(every)
            bounds.refine(every)
        return {n: b for n, b in self._values(every).items() if b is not None}

    def _values(self, numbers: Iterable[int], *, few: bool = False) -> dict[int, float | None]:
        """The bounds of the objective of jobs; None for those that are left out, which are counted
        in `cut`. For a `few` jobs the limit is that of their own meshes."""
        values: dict[int, float | None] = {}
        question, bounds, most = self._question, self._bounds, self._room({})
        if bounds is None:
            return values
        for n in numbers:
            seconds, memory = float(bounds.seconds[n]), float(bounds.memory[n])
            values[n] = question.objective_of(seconds, memory)
            if memory == SAME:
                self._answer.job_list.same += 1
                values[n] = None
            elif memory > (self._room(mesh_axes(self._jobs[n])) if few else most):
                self._answer.cut["too much memory by its bound"] += 1
                values[n] = None
            elif question.is_late(seconds):
                self._answer.cut["beyond the limit of its time by its bound"] += 1
                values[n] = None
        return values

    def _room(self, mesh: Mapping[str, int | None]) -> float:
        """The bytes that a rank of a job on this mesh may hold."""
        limit = self._question.limit
        sizes = {axis: size or 1 for axis, size in mesh.items()}
        return limit.room(sizes, self._question.machine) if limit else float("inf")

    def _refine(self, numbers: Sequence[int]) -> dict[int, float | None]:
        """Tighter bounds of the jobs that have them; None for those that are left out."""
        if self._bounds is None:
            return {}
        refined = self._values(self._bounds.refine(numbers), few=True)
        self._dropped += sum(bound is None for bound in refined.values())
        return refined

    # -- exact -------------------------------------------------------------------------------------

    def _evaluate(self, numbers: Sequence[int]) -> Iterator[tuple[int, float | None, Evaluated]]:
        question, answer = self._question, self._answer
        about = question.machine, question.limit, question.overlap, question.measured
        refused = [n for n in numbers if self._is_refused(n)]
        answer.cut.update(f"{REFUSED}{self._why(n)[:_LONG]}" for n in refused)
        self._skipped += len(refused)
        yield from ((n, None, NOTHING) for n in refused)
        jobs = [n for n in numbers if n not in refused]
        for i, evaluated in self._run([Task(self._jobs[n], *about) for n in jobs]):
            number = jobs[i]
            answer.known[number] = evaluated
            if isinstance(evaluated, str):
                self._refused.add(evaluated)
                answer.cut[f"{REFUSED}{evaluated[:_LONG]}"] += 1
                yield number, None, NOTHING
            elif evaluated.seconds is None:
                category = max(evaluated.memory, key=lambda c: evaluated.memory[c])
                answer.cut[f"too much memory, most of it {category}"] += 1
                yield number, None, evaluated
            elif question.is_late(evaluated.seconds):
                answer.cut["beyond the limit of its time"] += 1
                yield number, None, evaluated
            else:
                answer.timed += 1
                yield number, question.value(evaluated), evaluated

    def _why(self, number: int) -> str:
        """The message with which the compiler refuses the probe of a job; empty if it does not."""
        return self._bounds.refused[number] if self._bounds else ""

    def _is_refused(self, number: int) -> bool:
        """Whether the compiler will refuse a job: it refuses its probe with the message of another
        job that it refused as a whole."""
        return self._why(number) in self._refused

    def _progress(self, tried: int, best: Sequence[Ranked[Evaluated]], proven: float) -> None:
        rate = tried / max(1e-9, time.monotonic() - self._began)
        value = f"{best[0].value:.4g}" if best else "none yet"
        rest = f"none of the others below {proven:.4g}"
        self._log(f"{tried:,} evaluated ({rate:.1f}/s), best {value}, {rest}")
