"""A timeline as rows of cells for a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stagec.schedule.simulate import Event, ScheduleEvents

#: An action's kind, an overlapped pair, or nothing.
CellKind: TypeAlias = Literal["F", "B", "W", "FB", ""]

IDLE = "."
_LABEL = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """Some columns of a row; the length of `text` is the width of the cell."""

    kind: CellKind
    chunk: int
    text: str


def columns_for(timeline: ScheduleEvents, width: int) -> int:
    """The number of columns to draw, at most `width`: an integer per tick if possible."""
    ticks = timeline.ticks
    shortest = min((e.end - e.start for row in timeline.rows for e in row), default=1)
    wanted = -(-_LABEL // max(1, shortest))
    return ticks * min(wanted, width // ticks) if ticks <= width else width


def cells(timeline: ScheduleEvents, rank: int, columns: int) -> Iterator[Cell]:
    """The row of a rank from the start of the step to its end.

    A column shows the action that runs in the middle of its time, so short actions may be invisible
    in a narrow picture.
    """
    at = 0
    several = len(timeline.placement) > timeline.ranks
    for group in timeline.steps(rank):
        first, last = (_column(tick, timeline.ticks, columns) for tick in group[0][1:])
        if first > at:
            yield Cell("", 0, IDLE * (first - at))
        if last > first:
            yield _cell(group, last - first, several)
        at = max(at, last)
    if columns > at:
        yield Cell("", 0, IDLE * (columns - at))


def _column(tick: int, ticks: int, columns: int) -> int:
    """The first column whose middle is not before the tick."""
    return -(-(2 * tick * columns - ticks) // (2 * ticks))


def _cell(group: tuple[Event, ...], width: int, several: bool) -> Cell:
    actions = [event.action for event in group]
    kinds = "".join(a.kind for a in actions)
    names = "&".join(f"{a.kind}{a.microbatch}" for a in actions)
    labels = [names, kinds, kinds[0] if len(kinds) == 1 else "&"]
    if several and len(actions) == 1:
        labels.insert(0, f"{names}.{actions[0].chunk}")
    room = width if width < 3 else width - 1
    label = next((text for text in labels if len(text) <= room), labels[-1])
    text = label if len(label) == width else label + "=" * (width - 1 - len(label)) + " "
    kind: CellKind = "FB" if len(actions) > 1 else actions[0].kind
    return Cell(kind, actions[0].chunk, text)
