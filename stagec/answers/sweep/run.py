"""`--sweep` of `analyze`, `memory` and `time`: one job in many configurations, a row for each.

Rows are computed by worker processes or by a cluster. A configuration that fails is a row with the
reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stagec.answers.sweep.axes import Axis, Choice, SweepType, conflicts
from stagec.answers.sweep.rows import Case, SweepRow, fits, refused, rows
from stagec.jobs.request.command_line import question_command, step_command
from stagec.jobs.request.configurations import is_file_name
from stagec.jobs.request.emission import WORKERS, workers
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.option import AnyText, CommandOption
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.result import CSV, PLOTS, form_of
from stagec.jobs.session import Session
from stagec.output.report import Report
from stagec.output.svg_text import SVGText
from stagec.support.diagnostics import DiagnosticError, error

if TYPE_CHECKING:
    from stagec.answers.sweep.table import SweepColumn

Numbered = tuple[int, Mapping[str, SweepRow]]

#: The options that apply to a single job only.
_ALONE = (
    "symbolic",
    "print_strategy",
    "print_after",
    "dump_dir",
    "time_passes",
    "reproducer",
    "fit",
    "snapshot",
    "advise",
    "stage",
    "levers",
    "perfetto",
    "perfetto_ranks",
)
_MOST_ROWS = 100_000
#: The second column of a table -> its command.
_COMMANDS = {"time": "time", "parameters": "memory", "flops": "analyze"}

_OPTIONS = (
    CommandOption(
        "sort",
        AnyText(),
        "With --sweep: sort by this column, smallest first; -KEY: largest first.",
        metavar="KEY",
    ),
    CommandOption(
        "pareto",
        AnyText(),
        "With --sweep: only rows that no other row beats in these columns (time,memory).",
        metavar="KEY,...",
    ),
    CommandOption(
        "plot",
        AnyText(),
        "With --sweep and --html: the columns to draw (default: time or counts, and memory).",
        metavar="X,Y",
    ),
    CSV,
)


def sweep_options(*, timed: bool = False) -> tuple[CommandOption, ...]:
    """The options of a sweep; `timed` for jobs on a machine."""
    about = (
        "One row for each of these values of a flag (sp=on,off; tp=1..8 doubles from 1) or symbol "
        "(S=4096,8192), or for each table of a file. Several: one row for each combination."
    )
    return (
        CommandOption("sweep", SweepType(timed=timed), about, multiple=True),
        *_OPTIONS,
        *WORKERS,
    )


def check_alone(given: Mapping[str, Any], *, plotted: bool = False) -> None:
    """Raise `DiagnosticError` for options of a sweep without --sweep; `plotted` says whether the
    answer about one job has a plot."""
    wrong = [n for n in ("sort", "pareto", "plot", "jobs", "scheduler") if given[n]]
    if wrong:
        raise error(f"--{wrong[0]} needs --sweep", remedy="add --sweep")
    if not plotted and given["html"] is not None and given["html"].suffix in PLOTS:
        raise error(
            f"--html FILE{given['html'].suffix} is a plot of many configurations, and needs "
            "--sweep",
            remedy="add --sweep, or write --html FILE.html, whose pictures have buttons for SVG",
        )


@dataclass(frozen=True)
class SweepAnswer(Report):
    """The configurations of a sweep in order: the figures of each, or the reason of its failure.
    Its page has `every` row, by default these, and draws the two columns `plotted`. `command` is
    the command line."""

    configurations: Sequence[SweepRow]
    columns: Sequence[SweepColumn]
    model: str = ""
    every: Sequence[SweepRow] = ()
    plotted: tuple[str, str] | None = None
    asked: tuple[Case, Sequence[Axis]] | None = field(default=None, repr=False, compare=False)
    command: str = ""

    @property
    def possible(self) -> bool:
        """Whether any configuration is a job, within the limit if there is one."""
        return any(row.get("fits", "error" not in row) for row in self.drawn)

    @property
    def title(self) -> str:
        """The model, and the names of the axes."""
        return f"{self.about}: {' x '.join(self.drawn[0]['configuration'])}"

    @property
    def about(self) -> str:
        """The model, and the machine if all rows have one."""
        machine = self.asked[0].machine if self.asked is not None else None
        return self.model if machine is None else f"{self.model} on {machine.name}"

    @property
    def drawn(self) -> Sequence[SweepRow]:
        """The rows of the page."""
        return self.every or self.configurations

    @property
    def axes(self) -> tuple[str, str]:
        """The two columns of the plot."""
        from stagec.answers.sweep.sweep_page import default_axes

        return self.plotted or default_axes(self.columns)

    def page(self) -> str:
        """The plots, and all rows."""
        from stagec.answers.sweep.sweep_page import sweep_page

        return sweep_page(self)

    def plot(self) -> SVGText:
        from stagec.answers.sweep.sweep_page import sweep_plot

        return SVGText(sweep_plot(self).svg())

    def commands(self) -> list[str]:
        """The command of each row of the page; empty if the configurations are not known."""
        return [] if self.asked is None else commands_of(*self.asked, self.drawn)

    def as_json(self) -> list[SweepRow]:
        return list(self.configurations)

    def as_csv(self) -> str:
        from stagec.answers.sweep.table import sweep_csv

        return sweep_csv(self.configurations)

    def print(self, stream: TextIO) -> None:
        from stagec.answers.sweep.table import print_sweep

        print_sweep(self.configurations, self.columns, stream)


def sweep(
    case: Case, given: Mapping[str, Any], columns: Sequence[SweepColumn], session: Session
) -> SweepAnswer:
    """A row for each combination, in a table with these columns; `given` has the options of the
    command. Raises `DiagnosticError`."""
    axes: Sequence[Axis] = given["sweep"]
    limit: Limit | None = given["limit"]
    _check_options(case.options, given)
    columns = with_limit(columns, limit)
    how = {name: given[name] for name in ("sort", "pareto", "plot")}
    selection = selection_of(axes, columns, **how)
    with workers(given) as run, session.progress("analyzing", "configurations") as progress:
        rows = rows_of(case, axes, run, limit, progress)
    session.report(*limit.remarks() if limit is not None else ())
    return answer_of(rows, case, axes, columns, selection, limit, session)


@dataclass(frozen=True)
class RowSelection:
    """The selection and order of rows, the flags that ask for them, and the two columns of the
    plot."""

    front: Callable[[Sequence[SweepRow]], list[SweepRow]] | None
    key: Callable[[SweepRow], Any] | None
    flags: Mapping[str, str]
    plotted: tuple[str, str]


def selection_of(
    axes: Sequence[Axis],
    columns: Sequence[SweepColumn],
    *,
    sort: str | None,
    pareto: str | None,
    plot: str | None,
) -> RowSelection:
    """A selection by names of columns, in the form of the command line. Raises `DiagnosticError`
    for a name that is not a column."""
    from stagec.answers.sweep.order import front, key_of
    from stagec.answers.sweep.sweep_page import plotted

    swept = [axis.name for axis in axes]
    return RowSelection(
        front(pareto, swept, columns) if pareto is not None else None,
        key_of(sort, swept, columns) if sort is not None else None,
        {name: text for name, text in (("sort", sort), ("pareto", pareto)) if text is not None},
        plotted(plot, axes, columns),
    )


def answer_of(
    rows: Sequence[SweepRow],
    case: Case,
    axes: Sequence[Axis],
    columns: Sequence[SweepColumn],
    selection: RowSelection,
    limit: Limit | None,
    session: Session,
) -> SweepAnswer:
    """The answer with the selected rows, or with all rows if the selection is empty."""
    from stagec.answers.sweep.order import without_values
    from stagec.answers.sweep.table import of_rows

    for flag, wanted in selection.flags.items():
        session.report(*without_values(flag, wanted, rows, columns))
    columns = of_rows(columns, rows)
    front, key = selection.front, selection.key
    shown = (front(rows) if front is not None else []) or rows
    ordered = sorted(shown, key=key) if key is not None else shown
    asked = case, axes
    command = _sweep_command(case, axes, columns, limit)
    return SweepAnswer(ordered, columns, title_of(case), rows, selection.plotted, asked, command)


def _sweep_command(
    case: Case, axes: Sequence[Axis], columns: Sequence[SweepColumn], limit: Limit | None
) -> str:
    """The command of a sweep."""
    more = [word for axis in axes for word in ("--sweep", axis.text)]
    more += ["--limit", limit.text] if limit is not None else []
    more += [f"--no-{name}" for name in ("overlap", "graphs") if not getattr(case, name)]
    more += [word for path in case.measured for word in ("--measured", str(path))]
    more += ["--kernels-from", case.kernels_from] if case.kernels_from is not None else []
    asked = question_command(_COMMANDS[columns[1].name], case.options, case.machine)
    return f"{asked} {shlex.join(more)}"


def with_limit(columns: Sequence[SweepColumn], limit: Limit | None) -> Sequence[SweepColumn]:
    """The columns, with `FITS` at the end if there is a limit."""
    from stagec.answers.sweep.table import FITS

    return columns if limit is None else [*(c for c in columns if c is not FITS), FITS]


def title_of(case: Case) -> str:
    """The name of the model, if all configurations have the same one."""
    from stagec.jobs.builder import model_name

    return model_name(case.options) if case.options.model or case.options.preset else "a sweep"


def rows_of(
    case: Case,
    axes: Sequence[Axis],
    run: Callable[..., Iterator[Numbered]],
    limit: Limit | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SweepRow]:
    """The rows of each combination in order, computed by `run`: one, or one for each step with its
    pods. Raises `DiagnosticError` if no combination can be configured."""
    _check(case.options, axes)
    choices = list(product(*(axis.choices for axis in axes)))
    cases: dict[int, Case] = {}
    results: dict[int, Mapping[str, SweepRow]] = {}
    for number, choice in enumerate(choices):
        try:
            cases[number] = _configured(case, choice)
        except DiagnosticError as problem:
            if number == len(choices) - 1 and not cases:
                raise
            results[number] = refused(problem)
    numbers = list(cases)
    for done, (i, figures) in enumerate(run(rows, list(cases.values())), 1):
        results[numbers[i]] = {pod: _with_verdict(row, limit) for pod, row in figures.items()}
        progress(done, len(numbers))
    steps = max((each.keys() for each in results.values()), key=len)
    every_row: list[SweepRow] = []
    for number, choice in enumerate(choices):
        chosen = {axis.name: c.shown for axis, c in zip(axes, choice, strict=True)}
        for pod, figures in results[number].items():
            of_step = {"pod": pod} if len(steps) > 1 else {}
            every_row.append({"configuration": chosen | of_step, **figures})
    return every_row


def commands_of(case: Case, axes: Sequence[Axis], rows: Sequence[SweepRow]) -> list[str]:
    """The command of the configuration of each row; empty if flags cannot express it."""
    every = {tuple(c.shown for c in each): each for each in product(*(a.choices for a in axes))}
    names = [axis.name for axis in axes]
    chosen = (tuple(row["configuration"][name] for name in names) for row in rows)
    return [_command(case, every[each]) for each in chosen]


def _command(case: Case, choices: Sequence[Choice]) -> str:
    try:
        configured = _configured(case, choices)
    except DiagnosticError:
        return ""
    if configured.device is not None:  # a machine with other figures
        return ""
    return step_command(configured.options, configured.machine, overlap=configured.overlap)


def _with_verdict(row: SweepRow, limit: Limit | None) -> SweepRow:
    """A row with its entry `fits`, if there is a limit and it is a job."""
    if limit is None or "error" in row:
        return row
    if limit.text == AT_HAND:  # the machine of each pod
        return {**row, "fits": fits(row)}
    pods = row.get("pods", {"": row}).values()
    rooms = ((each["peak_bytes"], limit.room(each["mesh"])) for each in pods)
    return {**row, "fits": all(peak <= room for peak, room in rooms)}


def _check(options: JobOptions, axes: Sequence[Axis]) -> None:
    for name in conflicts(axes):
        flag = name.replace("_", "-")
        raise error(
            f"--sweep {flag} is given twice",
            remedy=f"give all values at once: --sweep {flag}=VALUE,...",
        )
    if options.preset and any("preset" in axis.sets for axis in axes):
        raise error(
            "--preset and --sweep preset cannot be used together",
            remedy=f"leave out --preset {options.preset}",
        )
    if "-" in (options.model, options.strategy):
        raise error(
            "--sweep cannot read from standard input: it reads the text once per configuration",
            remedy="give a file in place of '-'",
        )
    count = prod(len(axis.choices) for axis in axes)
    if count > _MOST_ROWS:
        raise error(
            f"--sweep asks for {count:,} configurations, expected at most {_MOST_ROWS:,}",
            remedy="sweep over fewer values or flags at a time",
        )


def _check_options(options: JobOptions, given: Mapping[str, Any]) -> None:
    alone = [n for n in _ALONE if _is_given(given.get(n)) or getattr(options, n, None)]
    if alone:
        flag = alone[0].replace("_", "-")
        raise error(
            f"--{flag} is an option of one job, and cannot be used with --sweep",
            remedy=f"leave out --{flag}",
        )
    form_of(given)


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _configured(case: Case, choices: Sequence[Choice]) -> Case:
    """A combination, with absolute paths for workers in other directories. Figures of the machine
    are set last, since the machine itself may be swept."""
    settings = [setting for choice in choices for setting in choice.settings]
    for setting in sorted(settings, key=lambda each: each.kind == "figure"):
        case = setting.applied_to(case)
    options = case.options
    changed = options.changed(
        model=_absolute(options.model) or "",
        strategy=_absolute(options.strategy),
        plugin=tuple(path.resolve() for path in options.plugin),
    )
    return replace(case, options=changed)


def _absolute(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and is_file_name(name) else name
