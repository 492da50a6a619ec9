"""The order of the rows of a sweep, and its Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stagec.answers.sweep.rows import SweepRow
from stagec.answers.sweep.table import SweepColumn, value_of
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.suggest import did_you_mean

Rows = Sequence[SweepRow]


def key_of(
    wanted: str, swept: Sequence[str], columns: Sequence[SweepColumn]
) -> Callable[[SweepRow], Any]:
    """The sort key of rows by a column or a swept name, descending after a minus; failed
    configurations come last. Raises `DiagnosticError`."""
    descending = wanted.startswith("-")
    name = column_named("sort", wanted.removeprefix("-"), swept, columns)

    def key(row: SweepRow) -> tuple[bool, bool, Any]:
        if "error" in row:
            return True, False, 0
        value = value_of(row, name, columns)
        if value is None:  # a job without tokens, for example
            return False, True, ""
        text = isinstance(value, str)  # a swept value may be a number or a text
        return False, text, _Descending(value) if descending else value

    return key


def without_values(
    flag: str, wanted: str, rows: Rows, columns: Sequence[SweepColumn]
) -> Iterator[Diagnostic]:
    """A warning for each of these columns in which no configuration has a value."""
    jobs = [row for row in rows if "error" not in row]
    for name in (part.strip().removeprefix("-") for part in wanted.split(",")):
        if jobs and all(value_of(row, name, columns) is None for row in jobs):
            yield Diagnostic(
                f"--{flag} {name} has no effect: no configuration has a value in this column",
                severity="warning",
                remedy="low and high need a --stack, tokens and each a model of tokens",
            )


class _Descending:
    """A value with reversed order."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.value < self.value)


def front(
    wanted: str, swept: Sequence[str], columns: Sequence[SweepColumn]
) -> Callable[[Rows], list[SweepRow]]:
    """A function that selects the Pareto front in these columns: the jobs that no other job
    dominates, among those that fit and separately for each step. Raises `DiagnosticError`."""
    names = [column_named("pareto", part.strip(), swept, columns) for part in wanted.split(",")]
    signs = [-1 if any(c.more and c.is_named(n) for c in columns) else 1 for n in names]

    def keep(rows: Rows) -> list[SweepRow]:
        points: list[tuple[str, tuple[Any, ...], SweepRow]] = []
        for row in rows:
            if "error" in row or not row.get("fits", True):
                continue
            values = [value_of(row, name, columns) for name in names]
            if any(not isinstance(value, int | float) for value in values):
                continue
            pod = row["configuration"].get("pod", "")
            points.append((pod, tuple(s * v for s, v in zip(signs, values, strict=True)), row))
        pods = {pod for pod, _, _ in points}
        fronts = {pod: unbeaten([p for of, p, _ in points if of == pod]) for pod in pods}
        return [row for pod, point, row in points if point in fronts[pod]]

    return keep


def unbeaten(points: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """The points that no other point dominates: none is as small in all coordinates and smaller in
    one."""
    front: list[tuple[Any, ...]] = []
    for point in sorted(set(points)):  # points that dominate another one precede it
        if not any(all(a <= b for a, b in zip(k, point, strict=True)) for k in front):
            front.append(point)
    return set(front)


def column_named(flag: str, name: str, swept: Sequence[str], columns: Sequence[SweepColumn]) -> str:
    """The name of a column or of an axis. Raises `DiagnosticError`."""
    names = [*swept, *(n for column in columns for n in (column.name, *column.aliases))]
    if name in names:
        return name
    remedy = did_you_mean(name, names) or f"choose among {', '.join(names)}"
    raise error(f"--{flag}: the table has no column '{name}'", remedy=remedy)
