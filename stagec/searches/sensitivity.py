"""Further reports of a search: the neighbours of the best strategy, the one nearest to the memory
limit, and how the best one depends on figures of the machine."""

from collections.abc import Iterator, Sequence
from typing import Any

from stagec.jobs.pod_options import machines_text
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.options import JobOptions
from stagec.machines import Machine
from stagec.searches.bounds import SAME
from stagec.searches.jobs import Evaluated, Run, Task
from stagec.searches.neighbours import neighbours_of
from stagec.searches.run import Answer
from stagec.searches.table import strategy_of

_FACTORS = (0.5, 2.0)


def neighbours(answer: Answer, run: Run | None) -> list[dict[str, Any]]:
    """The jobs of the space that differ from the best one in one flag, fastest first. Ranks and
    batch stay, so data parallelism and microbatches follow. With `run` they are evaluated, without
    it they have their values or bounds as far as these are known."""
    best = answer.best[0]
    jobs, sizes = answer.job_list.jobs, answer.question.sizes
    changes = neighbours_of(jobs, best.number, sizes)
    if run is not None:
        question = answer.question
        about = question.machine, question.limit, question.overlap, question.measured
        unknown = [n for n in changes if n not in answer.known]
        for i, evaluated in run([Task(jobs[n], *about) for n in unknown]):
            answer.known[unknown[i]] = evaluated
    seconds = answer.question.per_group(best.what.seconds or 1.0, best.what.tokens)
    rows = [_row(answer, n, change, seconds) for n, change in changes.items()]
    return sorted(rows, key=lambda row: (row["more"] is None, row["more"] or 0.0))


def _row(answer: Answer, number: int, change: str, best: float) -> dict[str, Any]:
    evaluated = answer.known.get(number)
    row: dict[str, Any] = {
        "change": change,
        "strategy": strategy_of(answer.job_list.jobs[number]),
        "more": None,
        "exact": isinstance(evaluated, Evaluated),
        "note": "",
    }
    if isinstance(evaluated, str):
        return {**row, "note": evaluated}
    if evaluated is not None:
        if evaluated.seconds is None:
            return {**row, "note": "does not fit", "memory_peak": evaluated.peak}
        if (most := answer.question.most_seconds) is not None and evaluated.seconds > most:
            return {**row, "note": "beyond the limit of its time", "memory_peak": evaluated.peak}
        seconds = answer.question.per_group(evaluated.seconds, evaluated.tokens)
        return {**row, "more": seconds / best - 1, "memory_peak": evaluated.peak}
    if answer.bounds is None:
        return row
    bounds, memory = answer.bounds
    if memory[number] == SAME:
        return {**row, "more": 0.0, "exact": True, "note": "the same job"}
    limit = answer.question.limit
    room = limit.room({}, answer.question.machine) if limit else None
    if room is not None and memory[number] > room:
        return {**row, "note": "does not fit", "memory_peak": int(memory[number])}
    return {**row, "more": float(bounds[number]) / best - 1, "note": "at least"}


def nearest(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Where no point fits, the one that exceeds the memory limit least: of the points that were
    compiled, or by their bounds if none was (`exact` is false). None if some point fits, or no
    point exceeds the limit."""
    rows: list[tuple[bool, float, dict[str, Any]]] = []
    for answer in answers:
        compiled = {n: e for n, e in answer.known.items() if isinstance(e, Evaluated)}
        if not answer.question.limit or any(e.seconds is not None for e in compiled.values()):
            continue
        memory = {n: e.peak for n, e in compiled.items()}
        if not memory and answer.bounds is not None:
            memory = {n: int(b) for n, b in enumerate(answer.bounds[1])}
        for n in sorted(memory, key=memory.__getitem__):
            if memory[n] > (room := _room(answer, n)):
                jobs = answer.job_list.jobs
                least = {"strategy": strategy_of(jobs[n]), "memory_at_least": memory[n]}
                row = {**least, "room": room, "machine": _device(jobs[n], answer.question.machine)}
                rows.append((not compiled, memory[n] / room, {**row, "exact": bool(compiled)}))
                break
    return min(rows, key=lambda row: row[:2])[2] if rows else None


def _device(options: JobOptions, machine: Machine) -> str:
    """The device whose memory is the limit of a job on `machine`, and on those of its parts."""
    names = machines_text(options, machine)
    return machine.given if names == machine.name else f"one of {names}"


def _room(answer: Answer, number: int) -> int:
    """The bytes that a rank of a job may hold; with several pods, of the pod that was evaluated."""
    known, limit = answer.known.get(number), answer.question.limit
    if isinstance(known, Evaluated) and known.room is not None:
        return known.room
    sizes = {axis: size or 1 for axis, size in mesh_axes(answer.job_list.jobs[number]).items()}
    return limit.room(sizes, answer.question.machine) if limit else 0


def sensitivity(answer: Answer, run: Run) -> list[dict[str, Any]]:
    """Which of the best strategies is best if a figure of the machine is halved or doubled, for
    each figure. Other strategies are not evaluated."""
    question = answer.question
    jobs = [answer.job(evaluated) for evaluated in answer.best]
    changed = list(_changed(question.machine))
    tasks = [
        Task(job, machine, None, question.overlap) for _, _, machine in changed for job in jobs
    ]
    seconds: list[float | None] = [None] * len(tasks)
    for number, evaluated in run(tasks):
        if isinstance(evaluated, Evaluated) and evaluated.seconds is not None:
            seconds[number] = question.per_group(evaluated.seconds, evaluated.tokens)
    rows: list[dict[str, Any]] = []
    for i, (figure, factor, _) in enumerate(changed):
        times = [s or float("inf") for s in seconds[i * len(jobs) : (i + 1) * len(jobs)]]
        first = times.index(min(times))
        rows.append(
            {
                "figure": figure,
                "factor": factor,
                "best": first + 1,
                "strategy": strategy_of(jobs[first]),
                "step_seconds": times[first],
                "step_of_winner": times[0],
            }
        )
    return rows


def _changed(machine: Machine) -> Iterator[tuple[str, float, Machine]]:
    figures = ["compute.matrix", "memory.bandwidth"]
    figures += [f"network.{level.name}.bandwidth" for level in machine.network]
    for figure in figures:
        for factor in _FACTORS:
            yield figure, factor, machine.scaled(figure, factor)
