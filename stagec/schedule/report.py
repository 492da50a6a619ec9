"""Reports on a schedule of given sizes and its replay."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

from stagec.schedule.base import ClosedForm, Schedule
from stagec.schedule.costs import UNIT, Costs, Time
from stagec.schedule.simulate import ScheduleEvents, replay
from stagec.schedule.validate import check_schedule
from stagec.support.words import counted


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A schedule of given sizes with its replay."""

    schedule: Schedule
    stages: int
    microbatches: int
    chunks: int
    costs: Costs
    transfer: Time
    timeline: ScheduleEvents
    theory: ClosedForm

    @property
    def bubble(self) -> Fraction:
        """The largest idle time of a rank, as counted by the closed form of the schedule."""
        return self.schedule.bubble(self.timeline)

    @property
    def in_flight(self) -> tuple[Fraction, ...]:
        """The most microbatches in flight on each rank."""
        return tuple(self.timeline.in_flight(rank) for rank in range(self.stages))

    @property
    def title(self) -> str:
        """The schedule and its sizes."""
        sizes = [counted(self.stages, "stage"), counted(self.microbatches, "microbatch", "es")]
        sizes += [f"{self.chunks} chunks per rank"] if self.chunks > 1 else []
        return f"{self.schedule.name}: {', '.join(sizes)}"


def run_schedule(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs = UNIT,
    transfer: Time = 0,
) -> ScheduleRun:
    """Check a schedule and replay it; by default with `default_chunks`.

    Raises `DiagnosticError` for invalid sizes or lists.
    """
    chunks = schedule.default_chunks if chunks is None else chunks
    schedule.check_actions(stages, microbatches, chunks)
    actions = schedule.actions(stages, microbatches, chunks)
    placement = schedule.placement(stages, chunks)
    check_schedule(actions, placement, microbatches)
    timeline = replay(actions, placement, costs, transfer)
    theory = schedule.closed_form(stages, microbatches, chunks, costs)
    if transfer:
        theory = ClosedForm(None, theory.in_flight)
    return ScheduleRun(schedule, stages, microbatches, chunks, costs, transfer, timeline, theory)


def facts(run: ScheduleRun) -> list[str]:
    """Texts with makespan, bubble and microbatches in flight, each with its closed form."""
    return [f"makespan: {run.timeline.makespan}", _bubble(run), _flight(run)]


def _bubble(run: ScheduleRun) -> str:
    formulas, makespan = run.schedule.formulas, run.timeline.makespan
    text = f"bubble: {run.bubble}, {_percent(run.bubble / makespan)} of the step"
    if run.schedule.scope == "span":
        idle = max(run.timeline.idle(rank) for rank in range(run.stages))
        text = (
            f"bubble between a rank's first and last action: {run.bubble}; in the whole step: "
            f"{idle}, {_percent(idle / makespan)} of it"
        )
    if run.theory.bubble is not None:
        return f"{text}; closed form {formulas.bubble} = {run.theory.bubble}"
    if not formulas.bubble:
        return text
    why = "transfers take no time" if run.transfer else formulas.condition
    return f"{text}; closed form {formulas.bubble} only if {why}"


def _flight(run: ScheduleRun) -> str:
    text = f"in flight, in microbatches: {_runs(run.in_flight)}"
    if run.theory.in_flight is None:
        return text
    value = "" if run.theory.in_flight == run.in_flight else f" = {_runs(run.theory.in_flight)}"
    return f"{text}; closed form {run.schedule.formulas.in_flight}{value}"


def _percent(share: Fraction) -> str:
    return f"{float(share):.1%}"


def _runs(values: tuple[Fraction, ...]) -> str:
    """`4 3 2 1`, or `16 on every rank`."""
    groups = [(value, len(list(group))) for value, group in groupby(values)]
    if len(groups) == 1 and len(values) > 1:
        return f"{groups[0][0]} on every rank"
    return " ".join(map(str, values))


def _number(value: int | Fraction | None) -> int | str | None:
    """An integer, or an exact fraction as a text."""
    if value is None or isinstance(value, int):
        return value
    return value.numerator if value.denominator == 1 else str(value)


def _numbers(values: tuple[Fraction, ...] | None) -> list[int | str | None] | None:
    return None if values is None else [_number(value) for value in values]


def as_json(run: ScheduleRun) -> dict[str, Any]:
    """The JSON form. Times are in the unit of the costs; those that are not integers are exact
    fractions as text."""
    costs, timeline = run.costs, run.timeline
    return {
        "schedule": run.schedule.name,
        "stages": run.stages,
        "microbatches": run.microbatches,
        "chunks": run.chunks,
        "costs": {
            "F": _number(costs.forward),
            "B": _number(costs.backward),
            "W": _number(costs.weight),
            "FB": _number(costs.pair),
        },
        "transfer": _number(run.transfer),
        "makespan": _number(timeline.makespan),
        "bubble": _number(run.bubble),
        "bubble_scope": run.schedule.scope,
        "bubble_closed_form": _number(run.theory.bubble),
        "idle": _numbers(tuple(timeline.idle(rank) for rank in range(run.stages))),
        "in_flight": _numbers(run.in_flight),
        "in_flight_closed_form": _numbers(run.theory.in_flight),
        "ranks": [_row_json(timeline, rank) for rank in range(run.stages)],
    }


def _row_json(timeline: ScheduleEvents, rank: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": action.kind,
            "chunk": action.chunk,
            "microbatch": action.microbatch,
            "start": _number(start * timeline.tick),
            "end": _number(end * timeline.tick),
            "overlapped": action.pair is not None,
        }
        for action, start, end in timeline.rows[rank]
    ]
