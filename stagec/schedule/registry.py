"""The schedules by name."""

from __future__ import annotations

from collections.abc import Iterable

from stagec.schedule.base import Schedule
from stagec.schedule.classic import GPipe, Interleaved, LoopedBreadthFirst, OneFOneB
from stagec.schedule.dualpipe import DualPipe, DualPipeV
from stagec.schedule.zero_bubble import ZBH1, ZBV, InterleavedZeroBubble
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

_BUILT_IN = (
    GPipe(),
    OneFOneB(),
    Interleaved(),
    LoopedBreadthFirst(),
    ZBH1(),
    InterleavedZeroBubble(),
    ZBV(),
    DualPipe(),
    DualPipeV(),
)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _BUILT_IN}


def known_schedules(extra: Iterable[Schedule] = ()) -> dict[str, Schedule]:
    """The built-in schedules and others. Raises `DiagnosticError` for a name used twice."""
    found = dict(SCHEDULES)
    for schedule in extra:
        if schedule.name in found:
            raise error(
                f"two schedules have the name '{schedule.name}'",
                remedy="give the new one another name",
            )
        found[schedule.name] = schedule
    return found


def find_schedule(name: str, extra: Iterable[Schedule] = ()) -> Schedule:
    """The schedule of a name. Raises `DiagnosticError` with the nearest name if there is none."""
    known = known_schedules(extra)
    if name not in known:
        raise error(
            f"no schedule '{name}'",
            remedy=did_you_mean(name, known) or f"choose among {', '.join(known)}",
        )
    return known[name]
