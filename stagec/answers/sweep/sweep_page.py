"""The page of a sweep, and its plot of two columns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from stagec.answers.sweep.axes import NAMED, Axis
from stagec.answers.sweep.order import column_named, unbeaten
from stagec.answers.sweep.rows import SweepRow, fits, notes
from stagec.answers.sweep.run import SweepAnswer
from stagec.answers.sweep.table import SweepColumn, chosen_text, value_of
from stagec.answers.time.table import seconds_text
from stagec.memory.timeline import ALL
from stagec.output.bars import Bar, Bars
from stagec.output.chart import Chart
from stagec.output.heat import Heat, HeatCell
from stagec.output.page import TableRow, command, figures, page, paragraphs, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint
from stagec.output.tables import bytes_text
from stagec.support.diagnostics import error

#: The titles of swept options on the axes of charts; others are titled by their names.
_FULL = {
    "tp": "tensor-parallel ranks (tp)",
    "pp": "pipeline stages (pp)",
    "dp": "data-parallel ranks (dp)",
    "cp": "context-parallel ranks (cp)",
    "ep": "expert-parallel ranks (ep)",
    "zero": "ZeRO stage (zero)",
    "microbatches": "microbatches per step",
}
#: The largest number of configurations whose commands are in the page.
_MOST_COMMANDS = 500


def plotted(
    wanted: str | None, axes: Sequence[Axis], columns: Sequence[SweepColumn]
) -> tuple[str, str]:
    """The two columns of a plot: the wanted ones, or the default. Raises `DiagnosticError`."""
    swept = [axis.name for axis in axes]
    names = [part.strip() for part in wanted.split(",")] if wanted else default_axes(columns)
    if len(names) != 2:
        raise error(f"--plot '{wanted}': expected two columns", remedy="--plot time,memory")
    x, y = (column_named("plot", name, swept, columns) for name in names)
    if y in swept:
        raise error(
            f"--plot {x},{y}: the second column is swept, expected a result",
            remedy=f"--plot {y},{x}",
        )
    return x, y


def default_axes(columns: Sequence[SweepColumn]) -> tuple[str, str]:
    """The default columns of a plot: time, FLOPs or parameters, and memory."""
    return columns[1].name, "peak"


def sweep_plot(answer: SweepAnswer) -> Plot:
    """The plot of two columns. Raises `DiagnosticError` if no row is a job."""
    columns, names = answer.columns, answer.axes
    jobs = [(f"row{n}", row) for n, row in enumerate(answer.drawn) if "error" not in row]
    if not jobs:
        raise error(
            "no configuration succeeded, so there is nothing to draw",
            remedy="leave out --html to see why",
        )
    x, y = names
    swept: Mapping[str, Any] = jobs[0][1]["configuration"]
    joined = x in swept or x == "ranks"
    describe = _about(columns)
    points = [
        PlotPoint(at, height, _series(row, x, joined), describe(row), fits(row) is not False, key)
        for key, row in jobs
        if (at := value_of(row, x, columns)) is not None
        and (height := value_of(row, y, columns)) is not None
    ]
    if joined and _are_one_line(points):
        points = [replace(point, series="") for point in points]
    signs = [-1 if any(c.more and c.is_named(n) for c in columns) else 1 for n in names]
    alone = joined or "pod" in swept  # two steps are not compared
    best = [] if alone else sorted(unbeaten([(signs[0] * p.x, signs[1] * p.y) for p in points]))
    over = _axis(x, columns), _axis(y, columns)
    return Plot(
        title=f"{over[1].title.capitalize()} over {over[0].title}",
        about=answer.about,
        command=answer.command,
        points=points,
        x=over[0],
        y=over[1],
        joined=joined,
        front=[(signs[0] * a, signs[1] * b) for a, b in best] if len(best) > 1 else [],
    )


def sweep_page(answer: SweepAnswer) -> str:
    """The page: charts whose marks are jobs, and all rows."""
    rows, columns, commands = answer.drawn, answer.columns, answer.commands()
    numbers: dict[str, int] = {}
    for text in (text for row in rows if "error" not in row for text in notes(row)):
        numbers.setdefault(text, len(numbers) + 1)
    heads = [*rows[0]["configuration"], *(c.title for c in columns)]
    heads += ["notes"] if numbers else []
    opens = {
        n: f"{text} --html step-{n}.html"
        for n, text in enumerate(commands[:_MOST_COMMANDS])
        if text and "error" not in rows[n]
    }
    lines = [_row(row, columns, numbers, f"row{n}", opens.get(n, "")) for n, row in enumerate(rows)]
    footnotes = (f"[{number}] {text}" for text, number in numbers.items())
    body = [
        command(answer.command),
        figures(_charts(answer)),
        "<h2>All configurations</h2>",
        *paragraphs(["Choose a row or a mark: the other pictures show it too."], "quiet"),
        table(heads, lines),
        *paragraphs(footnotes),
    ]
    return page(answer.title, body)


def _row(
    row: SweepRow, columns: Sequence[SweepColumn], numbers: Mapping[str, int], key: str, opens: str
) -> TableRow:
    values, texts = zip(*((v, chosen_text(v)) for v in row["configuration"].values()), strict=True)
    if "error" in row:
        return TableRow([*values, row["error"]], [*texts, row["error"]], key)
    shown = [(c.value(row), c.text(c.value(row))) for c in columns]
    marks = [" ".join(f"[{numbers[text]}]" for text in notes(row))] if numbers else []
    return TableRow(
        [*values, *(v for v, _ in shown), *marks],
        [*texts, *(t for _, t in shown), *marks],
        key,
        opens,
    )


def _charts(answer: SweepAnswer) -> Iterator[Chart]:
    rows = answer.drawn
    jobs = [(n, row) for n, row in enumerate(rows) if "error" not in row]
    if not jobs:
        return
    yield sweep_plot(answer)
    yield from _heats(answer)
    if len(jobs) < 2:
        return
    names_of = {n: _series(row, "", joined=True) for n, row in jobs}
    parts = [(n, row["time"]["breakdown"]) for n, row in jobs if "time" in row]
    for title, axis, each, order in (
        (
            "Peak memory by category",
            PlotAxis("bytes per rank", lambda size: bytes_text(round(size)), 1024),
            [(n, row["memory"]) for n, row in jobs],
            ALL,
        ),
        (
            "Time of a step by part",
            PlotAxis("time of the slowest class of ranks", seconds_text),
            parts,
            (),
        ),
    ):
        bars = [
            Bar(names_of[n], amounts, fits(rows[n]) is not False, f"row{n}") for n, amounts in each
        ]
        if bars:
            yield Bars(
                title=title,
                about=answer.about,
                command=answer.command,
                bars=bars,
                axis=axis,
                order=order,
            )


def _heats(answer: SweepAnswer) -> Iterator[Heat]:
    """A heat map over each pair of axes, of the first column of the plot that is not swept."""
    rows, columns = answer.drawn, answer.columns
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row["configuration"].items():
            known_values = values.setdefault(name, [])
            if value not in known_values:
                known_values.append(value)
    swept = [name for name, known_values in values.items() if len(known_values) > 1]
    drawn = next(n for n in answer.axes if n not in values)
    column = next(c for c in columns if c.is_named(drawn))
    for across, up in combinations(swept, 2):
        cells: dict[tuple[str, str], HeatCell] = {}
        for number, row in sorted(enumerate(rows), key=lambda each: _rank(each[1], column)):
            chosen = row["configuration"]
            place = chosen_text(chosen[across]), chosen_text(chosen[up])
            cells.setdefault(place, _cell(row, column, columns, f"row{number}"))
        if any(cell.value is not None for cell in cells.values()):
            yield Heat(
                title=f"{column.full.capitalize()} over {across} and {up}",
                about=answer.about,
                command=answer.command,
                across=(_FULL.get(across, across), [chosen_text(v) for v in values[across]]),
                up=(_FULL.get(up, up), [chosen_text(v) for v in values[up]]),
                cells=cells,
                value=column.full,
                more=column.more,
                several=len(rows) > len(cells),
            )


def _rank(row: SweepRow, column: SweepColumn) -> tuple[bool, bool, float]:
    """The order of rows in a cell: jobs that fit first, better ones first, failed ones last."""
    value = None if "error" in row else column.value(row)
    if value is None:
        return True, True, 0.0
    return False, fits(row) is False, -value if column.more else value


def _cell(row: SweepRow, column: SweepColumn, columns: Sequence[SweepColumn], key: str) -> HeatCell:
    if "error" in row:
        return HeatCell(None, "–", row["error"], key=key)
    value = column.value(row)
    about = _about(columns)(row)
    return HeatCell(value, column.text(value), about, fits(row) is not False, key)


def _are_one_line(points: Sequence[PlotPoint]) -> bool:
    """Whether each series is a single point at a different x, as for named configurations."""
    return len(points) == len({p.series for p in points}) == len({p.x for p in points})


def _series(row: SweepRow, x: str, joined: bool) -> str:
    """The name of the series of a row: for lines the values of all axes except x, for points that
    of the first axis. A named configuration has its name."""
    rest = [(n, v) for n, v in row["configuration"].items() if n != x]
    if not joined:
        rest = rest[:1]
    named = ("" if n == NAMED else f"{n.rpartition('.')[2]} " for n, _ in rest)
    return " ".join(f"{name}{chosen_text(v)}" for name, (_, v) in zip(named, rest, strict=True))


def _about(columns: Sequence[SweepColumn]) -> Callable[[SweepRow], str]:
    def described(row: SweepRow) -> str:
        chosen = ", ".join(f"{n} {chosen_text(v)}" for n, v in row["configuration"].items())
        return "\n".join([chosen, *(f"{c.full}: {c.text(c.value(row))}" for c in columns)])

    return described


def _axis(name: str, columns: Sequence[SweepColumn]) -> PlotAxis:
    column = next((c for c in columns if c.is_named(name)), None)
    if column is None or name == "ranks":
        return PlotAxis(_FULL.get(name, name.removeprefix("machine.")), _number)
    return PlotAxis(
        column.full, partial(_mark, column), 1024 if column.text is bytes_text else 1000
    )


def _number(value: Any) -> str:
    return f"{value:,g}" if isinstance(value, float) else chosen_text(value)


def _mark(column: SweepColumn, value: float) -> str:
    return column.text(round(value) if value >= 1000 else value)  # bytes and counts are whole
