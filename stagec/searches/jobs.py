"""Evaluates the jobs of a search: exact memory and time, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from stagec.ir_spec.strategy.axes import AXES
from stagec.jobs.pods import IN_POD
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.options import JobOptions
from stagec.searches.main_pod import with_batch_option
from stagec.searches.probes import Asked, Probe, probe
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.time.costs.replay_options import ReplayOptions

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine
    from stagec.time.costs.nodes import Measurements

#: Runs units of work; yields the number of each unit with its result.
Run = Callable[[Sequence[Any]], Iterator[tuple[int, Any]]]
#: Options in which jobs with one structure may differ; the number of stages is not among them.
_NUMBERS = {"sizes", "ranks", "explicit", *AXES} - {"pp"}


@dataclass(frozen=True, slots=True)
class Task:
    """A job to evaluate. A job above `limit` is not timed. If a step takes `most` seconds or more,
    nothing else is evaluated."""

    options: JobOptions
    machine: Machine
    limit: Limit | None
    overlap: bool = True
    measured: Measurements | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The figures of a job: its mesh, the bytes of its peak by category, and the room of a rank; if
    it fits, also the seconds of a step and their breakdown. With several pods, `pods` has their
    meshes, `memory` and `room` are those of the pod with the least memory left, and `mesh` is that
    of the slowest pod."""

    mesh: Mapping[str, int]
    memory: Mapping[str, int]
    room: int | None
    seconds: float | None = None
    tokens: int | None = None
    mfu: float | None = None
    breakdown: Mapping[str, float] | None = None
    pods: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, "Mapping[str, int]"])

    @property
    def meshes(self) -> list[Mapping[str, int]]:
        """The mesh of each pod."""
        return [*self.pods.values()] or [self.mesh]

    @property
    def mesh_of_all(self) -> dict[str, int]:
        """The axes of the mesh; with several pods they are named as in `main/tp`."""
        axes = {f"{pod}/{a}": n for pod, mesh in self.pods.items() for a, n in mesh.items()}
        return axes if self.pods else dict(self.mesh)

    @property
    def peak(self) -> int:
        """The peak in bytes."""
        return sum(self.memory.values())


#: Stands for a job that was not evaluated further.
NOTHING = Evaluated({}, {}, None)


def evaluate(task: Task) -> Evaluated | str:
    """The figures of a job, or the message with which the compiler refuses it."""
    from stagec.jobs.lowered import job_costs, rooms_of

    try:
        job = job_costs(with_batch_option(task.options))
        replay = ReplayOptions(task.overlap, measured=task.measured)
        time = cache(partial(job.time, task.machine, replay))
        if task.most is not None and time().step_seconds >= task.most:
            return NOTHING
        memory = job.memory_figures()
        rooms: Sequence[int | None] = [None] * len(memory.each)
        if task.limit is not None:
            rooms = rooms_of(job, memory, task.machine, task.limit)
        pairs = zip(memory.each, rooms, strict=True)
        fullest, room = max(pairs, key=lambda pair: pair[0].peak - (pair[1] or 0))
        pods = {pod: each.mesh for pod, each in memory.pods.items()}
        evaluated = Evaluated(fullest.mesh, fullest.categories, room, pods=pods)
        if room is not None and fullest.peak > room:
            return evaluated
        report = time()
        mesh = pods.get(report.slowest.partition("/")[0], fullest.mesh)
        return _timed(replace(evaluated, mesh=mesh), report)
    except DiagnosticError as problem:
        first = problem.diagnostics[0]
        where = [n.message for n in first.notes if n.message.startswith(IN_POD)]
        return ": ".join([*(p.removeprefix(IN_POD).strip(" '") for p in where), first.message])
    except NotAnIntegerError as problem:
        return str(problem)


def _timed(evaluated: Evaluated, report: TimeReport) -> Evaluated:
    about = report.step_seconds, report.tokens, report.mfu, dict(report.breakdown)
    return Evaluated(evaluated.mesh, evaluated.memory, evaluated.room, *about, pods=evaluated.pods)


def kind_of(unit: Task | Asked) -> Hashable:
    """A key that units share if they are likely to share a compile: all but sizes and degrees."""
    given = {n: v for n, v in vars(unit.options).items() if n not in _NUMBERS}
    return repr(given), *(getattr(unit.options, axis) > 1 for axis in AXES if axis != "pp")


def work(unit: Task | Asked) -> Evaluated | str | Probe:
    """Run a unit in a worker."""
    return probe(unit) if isinstance(unit, Asked) else evaluate(unit)


class Probes:
    """Makes probes, each once; `log` is called with progress messages."""

    def __init__(self, run: Run, log: Callable[[str], None]) -> None:
        self._run, self._log = run, log
        self._known: dict[str, Probe] = {}

    def __call__(self, asked: Sequence[Asked]) -> list[Probe]:
        """The probes, in order. Probes that share a compile are made one after the other."""
        keys = [f"{a.what} {_key(a.options)}" for a in asked]
        new = {k: a for k, a in zip(keys, asked, strict=True) if k not in self._known}
        order = sorted(new, key=lambda k: repr(kind_of(new[k])))
        for done, (number, result) in enumerate(self._run([new[k] for k in order]), 1):
            self._known[order[number]] = result
            more = f", {done:,} of the {len(new):,} that are wanted now"
            self._log(f"{len(self._known):,} probes made{more}")
        return [self._known[k] for k in keys]


#: The options of a job without flags.
_DEFAULTS = vars(JobOptions(""))


def _key(options: JobOptions) -> str:
    given = [(n, v) for n, v in vars(options).items() if v != _DEFAULTS[n]]
    return repr([each for each in given if each[0] not in ("explicit", "ranks")])
