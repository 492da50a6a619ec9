"""The order of the rows of a sweep, and which of them no other row beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagec.answers.sweep.rows import SweepRow
from stagec.answers.sweep.table import SweepColumn, value_of
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

Rows = Sequence[SweepRow]


def key_of(
    wanted: str, swept: Sequence[str], columns: Sequence[SweepColumn]
) -> Callable[[SweepRow], Any]:
    """What rows are sorted by, those that are no jobs last: a column or a swept name, greatest
    first with a minus before it. Raises `DiagnosticError`."""
    downwards = wanted.startswith("-")
    name = known("sort", wanted.removeprefix("-"), swept, columns)

    def key(found: SweepRow) -> tuple[bool, bool, Any]:
        if "error" in found:
            return True, False, 0
        value = value_of(found, name, columns)
        if value is None:  # a job without tokens, for example
            return False, True, ""
        text = isinstance(value, str)  # a swept value may be a number or a text
        return False, text, _Downwards(value) if downwards else value

    return key


class _Downwards:
    """A value whose order is reversed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Downwards) -> bool:
        return bool(other.value < self.value)


def front(
    wanted: str, swept: Sequence[str], columns: Sequence[SweepColumn]
) -> Callable[[Rows], list[SweepRow]]:
    """Keeps the jobs that no other beats: is as good in all of these columns, and better in one; of
    two steps that of the same pods. With a limit, of those that fit. Raises `DiagnosticError`."""
    names = [known("pareto", part.strip(), swept, columns) for part in wanted.split(",")]
    signs = [-1 if any(c.more and c.is_named(n) for c in columns) else 1 for n in names]

    def keep(rows: Rows) -> list[SweepRow]:
        points: list[tuple[str, tuple[Any, ...], SweepRow]] = []
        for found in rows:
            if "error" in found or not found.get("fits", True):
                continue
            values = [value_of(found, name, columns) for name in names]
            if any(not isinstance(value, int | float) for value in values):
                continue
            pod = found["configuration"].get("pod", "")
            points.append((pod, tuple(s * v for s, v in zip(signs, values, strict=True)), found))
        pods = {pod for pod, _, _ in points}
        kept = {pod: unbeaten([p for of, p, _ in points if of == pod]) for pod in pods}
        return [found for pod, point, found in points if point in kept[pod]]

    return keep


def unbeaten(points: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """The points of which no other is as small in all coordinates and smaller in one."""
    kept: list[tuple[Any, ...]] = []
    for point in sorted(set(points)):  # whatever beats a point stands before it
        if not any(all(a <= b for a, b in zip(k, point, strict=True)) for k in kept):
            kept.append(point)
    return set(kept)


def known(flag: str, name: str, swept: Sequence[str], columns: Sequence[SweepColumn]) -> str:
    """The name of a column or of what is swept. Raises `DiagnosticError`."""
    names = [*swept, *(n for column in columns for n in (column.name, *column.aliases))]
    if name in names:
        return name
    remedy = did_you_mean(name, names) or f"choose among {', '.join(names)}"
    raise error(f"--{flag}: the table has no column '{name}'", remedy=remedy)
