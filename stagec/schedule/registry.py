"""The schedules by name."""

from collections.abc import Iterable

from stagec.schedule.base import Schedule
from stagec.schedule.classic import GPipe, Interleaved, LoopedBreadthFirst, OneFOneB
from stagec.schedule.dualpipe import DualPipe, DualPipeV
from stagec.schedule.zero_bubble import ZBH1, ZBV, InterleavedZeroBubble
from stagec.support.named import by_name, find

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
SCHEDULES: dict[str, Schedule] = by_name("schedules", _BUILT_IN)


def known_schedules(plugin_schedules: Iterable[Schedule] = ()) -> dict[str, Schedule]:
    """The built-in schedules and those of plug-ins, by name. Raises `DiagnosticError` for a name
    that is used twice."""
    return by_name("schedules", _BUILT_IN, plugin_schedules)


def find_schedule(name: str, plugin_schedules: Iterable[Schedule] = ()) -> Schedule:
    """The schedule of a name. Raises `DiagnosticError` with the nearest name if there is none."""
    return find("schedule", name, known_schedules(plugin_schedules))
