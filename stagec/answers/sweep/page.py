"""The page of a sweep, and its plot of two columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from stagec.answers.sweep.axes import Axis
from stagec.answers.sweep.order import known, unbeaten
from stagec.answers.sweep.plot import PlotAxis, PlotPoint, plot
from stagec.answers.sweep.rows import SweepRow, fits, notes
from stagec.answers.sweep.table import SweepColumn, chosen_text, value_of
from stagec.output.page import plain
from stagec.output.tables import bytes_text
from stagec.support.diagnostics import error

_BODY = """{plot}
<table>
<tr>{head}</tr>
{rows}
</table>"""
_STYLE = """
table { border-collapse: collapse; } th, td { padding: .15rem .6rem; text-align: right; }
td { white-space: nowrap; }
th { border-bottom: 1px solid; } .none { text-align: left; opacity: .6; }
"""


def plotted(
    wanted: str | None, axes: Sequence[Axis], columns: Sequence[SweepColumn]
) -> tuple[str, str]:
    """The two columns of a plot: those asked for, else time, FLOPs or parameters, and memory.
    Raises `DiagnosticError`."""
    swept = [axis.name for axis in axes]
    names = [part.strip() for part in wanted.split(",")] if wanted else default_axes(columns)
    if len(names) != 2:
        raise error(f"--plot {wanted}: expected two columns", remedy="--plot time,memory")
    x, y = (known("plot", name, swept, columns) for name in names)
    if y in swept:
        raise error(f"--plot {x},{y}: the second is swept", remedy=f"--plot {y},{x}")
    return x, y


def default_axes(columns: Sequence[SweepColumn]) -> tuple[str, str]:
    """Time, FLOPs or parameters, and memory."""
    return columns[1].name, "peak"


def sweep_plot(
    rows: Sequence[SweepRow], names: tuple[str, str], columns: Sequence[SweepColumn]
) -> str:
    """The plot of two columns, an SVG. Raises `DiagnosticError` where no row is a job."""
    jobs = [row for row in rows if "error" not in row]
    if not jobs:
        raise error("no configuration to draw", remedy="see why: leave out --html")
    return _drawn(jobs, names, columns)


def sweep_page(
    title: str,
    rows: Sequence[SweepRow],
    names: tuple[str, str],
    columns: Sequence[SweepColumn],
) -> str:
    """The page: a plot, where a row is a job, and all rows."""
    jobs = [row for row in rows if "error" not in row]
    drawn = _drawn(jobs, names, columns) if jobs else ""
    heads = [*rows[0]["configuration"], *(c.title for c in columns)]
    numbers: dict[str, int] = {}
    for text in (text for row in jobs for text in notes(row)):
        numbers.setdefault(text, len(numbers) + 1)
    heads += [""] if numbers else []
    lines = (_line(row, columns, numbers) for row in rows)
    told = [f"[{number}] {text}" for text, number in numbers.items()]
    return _filled(title, drawn, heads, lines, told)


def page_of(
    title: str,
    drawn: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    cautions: Iterable[str] = (),
) -> str:
    """The page with a plot and a table of these cells, and what to know of them below."""
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return _filled(title, drawn, heads, (f"<tr>{line}</tr>" for line in lines), cautions)


def _filled(
    title: str, drawn: str, heads: Sequence[str], rows: Iterable[str], cautions: Iterable[str]
) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    told = "".join(f"\n<p>{escape(text)}</p>" for text in cautions)
    body = _BODY.format(plot=drawn, head=head, rows="\n".join(rows))
    return plain(title, body + told, _STYLE)


def _line(row: SweepRow, columns: Sequence[SweepColumn], numbers: Mapping[str, int]) -> str:
    cells = [chosen_text(v) for v in row["configuration"].values()]
    if "error" in row:
        told = f'<td class="none" colspan="{len(columns)}">{escape(row["error"])}</td>'
    else:
        told = "".join(f"<td>{escape(c.text(c.value(row)))}</td>" for c in columns)
        marks = " ".join(f"[{numbers[text]}]" for text in notes(row))
        told += f"<td>{marks}</td>" if numbers else ""
    return f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells)}{told}</tr>"


def _drawn(jobs: Sequence[SweepRow], names: tuple[str, str], columns: Sequence[SweepColumn]) -> str:
    x, y = names
    swept: Mapping[str, Any] = jobs[0]["configuration"]
    joined = x in swept or x == "ranks"
    about = _about(columns)
    points = [
        PlotPoint(at, height, _series(row, x, joined), about(row), fits(row) is not False)
        for row in jobs
        if (at := value_of(row, x, columns)) is not None
        and (height := value_of(row, y, columns)) is not None
    ]
    signs = [-1 if any(c.more and c.is_named(n) for c in columns) else 1 for n in names]
    best = [] if joined else sorted(unbeaten([(signs[0] * p.x, signs[1] * p.y) for p in points]))
    return plot(
        points,
        _axis(x, columns),
        _axis(y, columns),
        joined=joined,
        front=[(signs[0] * a, signs[1] * b) for a, b in best] if len(best) > 1 else [],
    )


def _series(row: SweepRow, x: str, joined: bool) -> str:
    """What distinguishes lines: all that is swept but x; points, the first thing that is."""
    rest = [(n, v) for n, v in row["configuration"].items() if n != x]
    if not joined:
        rest = rest[:1]
    return " ".join(f"{n.rpartition('.')[2]} {chosen_text(v)}" for n, v in rest)


def _about(columns: Sequence[SweepColumn]) -> Callable[[SweepRow], str]:
    def told(row: SweepRow) -> str:
        chosen = ", ".join(f"{n} {chosen_text(v)}" for n, v in row["configuration"].items())
        return f"{chosen}: " + ", ".join(f"{c.title} {c.text(c.value(row))}" for c in columns)

    return told


def _axis(name: str, columns: Sequence[SweepColumn]) -> PlotAxis:
    column = next((c for c in columns if c.is_named(name)), None)
    if column is None or name == "ranks":
        return PlotAxis(name.removeprefix("machine."), _number)
    return PlotAxis(
        column.title, partial(_mark, column), 1024 if column.text is bytes_text else 1000
    )


def _number(value: Any) -> str:
    return f"{value:,g}" if isinstance(value, float) else chosen_text(value)


def _mark(column: SweepColumn, value: float) -> str:
    """A mark of an axis as the column writes its values, without zeros at the end."""
    if not value:
        return "0"
    text = column.text(round(value) if value >= 1000 else value)  # bytes and counts are whole
    return re.sub(r"\.0+(?!\d)|(\.\d*?)0+(?!\d)", r"\1", text)
