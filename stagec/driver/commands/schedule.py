"""`stagec schedule`: pictures of pipeline schedules, with bubble and microbatches in flight."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes, type_of
from stagec.driver.shell.show import LISTING, Listing, show_list, write_output
from stagec.jobs.request.option import PLUGIN, CommandOption, Kind
from stagec.jobs.request.result import FILE_OR_STDOUT
from stagec.output.report import Report
from stagec.schedule.attached import schedules_of
from stagec.schedule.base import Schedule
from stagec.schedule.costs import Costs
from stagec.schedule.draw import CellKind, cells, columns_for
from stagec.schedule.registry import find_schedule, known_schedules
from stagec.schedule.report import ScheduleRun, as_json, facts, run_schedule
from stagec.schedule.svg import timeline_svg

_COLOURS: dict[CellKind, tuple[str, str]] = {
    "F": ("black on #9cc2f5", "black on #6fa4ea"),
    "B": ("black on #9fd8a4", "black on #6fbf77"),
    "W": ("black on #f3cf7a", "black on #e3b13f"),
    "FB": ("black on #7fd0cf", "black on #7fd0cf"),
    "": ("dim", "dim"),
}
_NAMES = {"F": "forward", "B": "backward", "W": "weight", "FB": "overlapped"}
_HINT = (
    "p stages, m microbatches, v chunks per rank; F forward, B whole backward, W gradient of the "
    "weights,\nF&B an overlapped pair, each for the share of the model of one rank."
)
_TIME = re.compile(r"\d{1,9}(\.\d{1,6}|/[1-9]\d{0,8})?")


class Times(Kind[Costs]):
    """`F=1,B=2,W=1,FB=3`, in any order and with any of them omitted."""

    name = "F=..,B=..,W=..,FB=.."

    def read(self, text: str) -> Costs:
        """The costs; times are integers, decimals or fractions such as 5/2."""
        times: dict[str, Fraction] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, time = (p.strip() for p in part.partition("="))
            if name not in _NAMES or not _TIME.fullmatch(time):
                raise ValueError(f"'{part}' is not F, B, W or FB with a time, as in F=1")
            if _NAMES[name] in times:
                raise ValueError(f"{name} is given twice")
            times[_NAMES[name]] = Fraction(time)
        return Costs(**times)


class Time(Kind[Fraction]):
    """An integer, a decimal or a fraction such as 5/2."""

    name = "TIME"

    def read(self, text: str) -> Fraction:
        """The exact time."""
        if not _TIME.fullmatch(text):
            raise ValueError(f"'{text}' is not a time such as 1, 0.5 or 1/3")
        return Fraction(text)


_SVG = CommandOption(
    "svg", FILE_OR_STDOUT, "Also write a picture; '-' writes only the picture, to stdout."
)


@click.command("schedule")
@click.argument("name", required=False, shell_complete=completion.COMPLETERS["schedules"])
@click.option("--stages", type=click.IntRange(1), help="Ranks of the pipeline.")
@click.option("--microbatches", type=click.IntRange(1), help="Microbatches per step.")
@click.option("--chunks", type=click.IntRange(1), help="Chunks of the model on each rank.")
@click.option(
    "--costs",
    type=type_of(Times()),
    default="F=1,B=2,W=1",
    show_default=True,
    help="Times of a microbatch on a rank: forward, whole backward, the weight gradient "
    "within it, and FB, an overlapped forward and backward (default F + B).",
)
@click.option(
    "--transfer", type=type_of(Time()), default="0", help="Time from one rank to another."
)
@takes(_SVG, *LISTING, PLUGIN)
def command(
    name: str | None,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: Costs,
    transfer: Fraction,
    svg: Path | None,
    plugin: tuple[Path, ...],
    **given: Any,
) -> None:
    """Draw a pipeline schedule; without a name, list them with their closed forms."""
    plugin_schedules = _from_plugins(plugin) if plugin else []
    if name is None:
        rows = [_row(each) for each in known_schedules(plugin_schedules).values()]
        cells = [[row[n] for n in _COLUMNS] for row in rows]
        head = "Pipeline schedules", *_COLUMNS.values()
        show_list(Listing(rows, head, cells, 160), given, _HINT)
        return
    schedule = find_schedule(name, plugin_schedules)
    if stages is None or microbatches is None:
        raise click.UsageError(
            "--stages and --microbatches are required, as in --stages 4 --microbatches 8"
        )
    run = run_schedule(schedule, stages, microbatches, chunks, costs, transfer)
    if svg is not None:
        write_output(timeline_svg(run.timeline, run.title, facts(run)), svg)
    if str(svg) != "-":
        show_list(ScheduleAnswer(run), given)


def _from_plugins(files: tuple[Path, ...]) -> list[Schedule]:
    from stagec.pipeline.plugins import load_plugins

    return schedules_of(load_plugins(files).registry)


def _row(s: Schedule) -> dict[str, Any]:
    return {
        "name": s.name,
        "summary": s.summary,
        "chunks": s.default_chunks,
        "splits_weight_gradient": s.splits_weight_gradient,
        "bubble": s.formulas.bubble,
        "bubble_scope": s.scope,
        "in_flight": s.formulas.in_flight,
        "condition": s.formulas.condition,
        "source": s.source,
    }


#: The columns of the list: the entry of a row -> the title.
_COLUMNS = {
    "name": "name",
    "summary": "what it does",
    "bubble": "bubble per rank",
    "in_flight": "in flight on rank r",
    "condition": "when",
    "source": "source",
}


@dataclass(frozen=True)
class ScheduleAnswer(Report):
    """A schedule of given sizes: its picture, and its figures with their closed forms."""

    run: ScheduleRun

    def as_json(self) -> dict[str, Any]:
        return as_json(self.run)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each action, with its rank, start and end."""
        ranks = enumerate(self.as_json()["ranks"])
        return [{"rank": rank, **action} for rank, actions in ranks for action in actions]

    def print(self, stream: TextIO) -> None:
        _draw(self.run, stream)


def _draw(run: ScheduleRun, stream: TextIO) -> None:
    from rich.text import Text

    from stagec.output.tables import console

    out = console(stream)
    coloured = out.color_system is not None
    digits = len(str(run.stages - 1))
    columns = columns_for(run.timeline, max(20, out.width - len("rank ") - digits - 1))
    out.print(Text(run.title, style="bold"))
    for rank in range(run.stages):
        line = Text(f"rank {rank:>{digits}} ", no_wrap=True, overflow="crop")
        for cell in cells(run.timeline, rank, columns):
            text = cell.text.replace("=", " ") if coloured else cell.text
            line.append(text, _COLOURS[cell.kind][cell.chunk % 2])
        if not coloured:
            line.rstrip()
        out.print(line)
    for fact in facts(run):
        out.print(fact)
