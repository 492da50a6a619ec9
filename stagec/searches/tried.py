"""Levers: flags that keep the numerics, with values beyond the space, tried on the best strategy.

Each value is tried on the best job on its own, then all that helped at once. Flags for which the
user gave values are not tried.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from string import ascii_lowercase
from typing import Any, NamedTuple

from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.ir_spec.strategy.mesh_flags import MESH_ORDER
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.legal import idle
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.flags import OF_ONE_MESH
from stagec.jobs.request.options import JobOptions
from stagec.schedule.registry import SCHEDULES
from stagec.searches.explore.space import Space, doubled
from stagec.searches.jobs import Evaluated, Run, Task
from stagec.searches.run import Answer, Log
from stagec.searches.space import MICROBATCH, MICROBATCH_FLAG, list_jobs, microbatch_of, values_text
from stagec.searches.table import command_of, strategy_of

#: Flags that follow from others: data parallelism from ranks, microbatches from their size.
_FOLLOW = ("dp", "microbatches")
#: A job is better from this share of the objective of the best on, not by less than a table shows.
_BETTER = 0.999


class _Trial(NamedTuple):
    """The best job with other values of some flags."""

    values: Mapping[str, Any]
    job: JobOptions


def tried(answer: Answer, run: Run, log: Log) -> dict[str, Any]:
    """The number of jobs that were tried, and those that are better than the best of the space,
    best first."""
    every = (t for flag in flags_to_try(answer) for t in _of_flag(answer, flag))
    trials = [*{repr(vars(t.job)): t for t in every}.values()]
    better = [*_evaluated(answer, trials, _telling(run, log))]
    together = _together(better)
    if len(together) > 1 and (both := _trial(answer, together)) is not None:
        trials.append(both)
        better += _evaluated(answer, [both], run)
    better.sort(key=lambda each: each[0])
    return {
        "count": len(trials),
        "better": [_row(answer, n, *each) for n, each in enumerate(better)],
    }


def flags_to_try(answer: Answer) -> Iterator[Flag]:
    """The flags of which other values may improve the best job."""
    given, job = answer.question.given, _best(answer)
    memory = answer.question.objective == "memory"
    for flag in OF_ONE_MESH.values():
        fixed = flag.numerics or flag.software or flag.name in given or flag.name in _FOLLOW
        worse = flag.spares and flag.is_default(getattr(job, flag.name)) and not memory
        if not (fixed or worse):
            yield flag
    if MICROBATCH in answer.question.space.knobs.keys() - given:
        yield MICROBATCH_FLAG


# -- jobs ------------------------------------------------------------------------------------------


def _of_flag(answer: Answer, flag: Flag) -> Iterator[_Trial]:
    """The best job with each other value of a flag. A schedule takes its own number of chunks if it
    refuses that of the job."""
    for value in _values(answer, flag):
        trial = _trial(answer, {flag.name: value})
        if trial is None and flag.name == "schedule":
            trial = _trial(answer, {flag.name: value, "chunks": 0})
        if trial is not None:
            yield trial


def _values(answer: Answer, flag: Flag) -> Iterable[Any]:
    """The values of a flag to try in place of that of the best job."""
    job = _best(answer)
    match flag.name:
        case "schedule":
            return [name for name in SCHEDULES if name != job.schedule]
        case "dp_replicate":
            return doubled(2, job.dp)
        case "dp_shard":  # over all of them it is plain data parallelism
            return doubled(2, job.dp // 2)
        case MESH_ORDER.name:
            return _swapped([*mesh_axes(job)])
        case name if name == MICROBATCH:
            return flag.others(microbatch_of(job, answer.question.sizes))
        case name:
            return flag.others(getattr(job, name))


def _swapped(axes: Sequence[str]) -> Iterator[str]:
    """The orders of axes in which two neighbours are swapped."""
    for slow, fast in pairwise(axes):
        yield ",".join({slow: fast, fast: slow}.get(axis, axis) for axis in axes)


def _trial(answer: Answer, values: Mapping[str, Any]) -> _Trial | None:
    """The best job with these values; None if the rules refuse it, if the values have no effect, or
    if the space has the job."""
    question, job = answer.question, _best(answer)
    base = question.base.changed(ranks=question.ranks)
    names = {*question.space.knobs, *values} - {*DATA_AXES, MICROBATCH}
    names |= {*DATA_AXES} & {*question.space.knobs}
    point = {n: getattr(job, n) for n in names}
    if MICROBATCH in question.space.knobs:
        point[MICROBATCH] = microbatch_of(job, question.sizes)
    space = Space({n: (v,) for n, v in {**point, **values}.items()})
    jobs = list_jobs(space, base, question.sizes, question.layers.total).jobs
    if not len(jobs) or answer.job_list.jobs.has(jobs[0]):
        return None
    without_effect = idle(jobs[0], question.sizes) - idle(job, question.sizes)
    return None if without_effect else _Trial(values, jobs[0])


def _best(answer: Answer) -> JobOptions:
    return answer.job(answer.best[0])


def _telling(run: Run, log: Log) -> Run:
    """`run`, with messages about the number of jobs that are done."""

    def telling(units: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for done, result in enumerate(run(units), 1):
            log(f"{done:,} of {len(units):,} flags beyond the space tried")
            yield result

    return telling


# -- values ----------------------------------------------------------------------------------------


def _evaluated(
    answer: Answer, trials: Sequence[_Trial], run: Run
) -> Iterator[tuple[float, _Trial, Evaluated]]:
    """The trials that are better than the best of the space, each with its objective over that of
    the best."""
    question, best = answer.question, answer.best[0]
    about = question.machine, question.limit, question.overlap, question.measured
    is_seconds = question.objective == "time"  # then the memory of slower jobs does not matter
    tasks = [Task(t.job, *about, best.value if is_seconds else None) for t in trials]
    results = sorted(run(tasks), key=itemgetter(0))
    for number, result in results:  # in a fixed order, whichever was done first
        value = question.value(result) if isinstance(result, Evaluated) else None
        if isinstance(result, Evaluated) and value is not None and value <= _BETTER * best.value:
            yield value / best.value, trials[number], result


def _together(better: Iterable[tuple[float, _Trial, Evaluated]]) -> dict[str, Any]:
    """The best value of each flag that helped."""
    best: dict[str, Any] = {}
    for _, trial, _ in sorted(better, key=lambda each: each[0]):
        if best.keys().isdisjoint(trial.values):
            best |= trial.values
    return best


def _row(
    answer: Answer, number: int, part: float, trial: _Trial, result: Evaluated
) -> dict[str, Any]:
    name = f"1{ascii_lowercase[number]}" if number < len(ascii_lowercase) else f"1-{number + 1}"
    return {
        "name": name,
        "change": changes_text(trial.values, trial.job),
        "strategy": strategy_of(trial.job),
        "command": command_of(trial.job, name),
        "more": part - 1,
        "step_seconds": result.seconds,
        "memory_peak": result.peak,
    }


def changes_text(values: Mapping[str, Any], job: JobOptions) -> str:
    """`sp off, fusion epilogue`: the values that the job has; others have no effect in it."""
    kept = {name: value for name, value in values.items() if getattr(job, name, value) == value}
    return ", ".join(f"{n.replace('_', '-')} {values_text(n, [v])}" for n, v in kept.items())
