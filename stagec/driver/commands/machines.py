"""`stagec machines`: the devices and networks of the library, with their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.session import log, the_session
from stagec.driver.shell.show import show
from stagec.jobs.request.machine import machine_of
from stagec.jobs.request.option import CommandOption
from stagec.jobs.request.result import FORM, JSON, OUTPUT, PAGE, form_of
from stagec.machines import Level, Machine, figure_text, machines
from stagec.output.report import Report
from stagec.output.tables import bytes_text, console, count_text, table

if TYPE_CHECKING:
    from stagec.output.bars import Bars

_HTML = CommandOption("html", PAGE, "Write a page that compares the machines, or describes one.")
#: The figures that are compared: the name of a column, and the format of its values.
_COMPARED: Mapping[str, Callable[[float], str]] = {
    "BF16": lambda rate: count_text(round(rate), "FLOP/s"),
    "FP8": lambda rate: count_text(round(rate), "FLOP/s"),
    "memory": lambda size: bytes_text(round(size)),
    "bandwidth": lambda rate: count_text(round(rate), "B/s"),
}
_HINT = "'stagec machines NAME' prints every figure with its source; a FILE is read and checked."
_HEADS = "name", "machine", *_COMPARED, "network per rank"


@click.command("machines")
@click.argument(
    "name", metavar="[NAME|FILE]", required=False, shell_complete=completion.COMPLETERS["machines"]
)
@takes(JSON, FORM, _HTML, OUTPUT)
def command(name: str | None, **given: Any) -> None:
    """List the machines, or print every figure of one with its source. A file of your own is
    checked; docs/machines.md says how to write one."""
    if name is not None:
        show(MachineAnswer(machine_of(name, the_session())), given)
        return
    show(MachinesAnswer(list(machines().values())), given)
    if form_of(given) is None and given["html"] is None:
        log(_HINT)


def _object(machine: Machine) -> dict[str, Any]:
    """The machine with values in bytes, bytes/s, FLOP/s, Hz and seconds."""
    return machine.model_dump(mode="json", by_alias=True)


def _level(level: Level) -> str:
    """`nvlink 450 GB/s (8)`."""
    ranks = "" if level.ranks is None else f" ({level.ranks})"
    return f"{level.name} {figure_text(level.bandwidth)}{ranks}"


@dataclass(frozen=True)
class MachinesAnswer(Report):
    """A comparison of machines."""

    machines: Sequence[Machine]

    @property
    def title(self) -> str:
        return "Machines"

    def as_json(self) -> list[dict[str, Any]]:
        return [_object(machine) for machine in self.machines]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each machine, in FLOP/s, bytes and bytes/s."""
        names = "name", "title", *(name.lower() for name in _COMPARED), "network"
        each = ((m.name, m.title, *_values(m), _network(m)) for m in self.machines)
        return [dict(zip(names, values, strict=True)) for values in each]

    def print(self, stream: TextIO) -> None:
        rows = table("Machines", *_HEADS, rows=map(_texts, self.machines))
        rows.columns[1].justify = rows.columns[6].justify = "left"
        console(stream, 170).print(rows)

    def page(self) -> str:
        """Bars of each compared figure, and a table of all."""
        from stagec.output.page import TableRow, command, figures, page, paragraphs, table

        opens = "stagec machines {0} --html {0}.html"
        rows = [
            TableRow(list(row.values()), _texts(m), m.name, opens.format(m.name))
            for m, row in zip(self.machines, self.rows(), strict=True)
        ]
        hint = "Choose a bar or a row for the command that writes its figures with their sources."
        body = [command("stagec machines"), *paragraphs([hint], "quiet"), figures(self._charts())]
        return page(self.title, [*body, table(_HEADS, rows)])

    def _charts(self) -> Iterator[Bars]:
        from stagec.output.bars import Bar, Bars
        from stagec.output.plot import PlotAxis

        titles = {
            "BF16": ("Matrix products in BF16", "dense rate per device"),
            "memory": ("Memory", "bytes per device"),
            "bandwidth": ("Bandwidth of the memory", "bytes per second per device"),
        }
        for name, (title, unit) in titles.items():
            column = list(_COMPARED).index(name)
            values = [(m.name, _values(m)[column] or 0.0) for m in self.machines]
            ordered = sorted(values, key=lambda each: -each[1])
            yield Bars(
                title=title,
                command="stagec machines",
                bars=[Bar(machine, {unit: value}, key=machine) for machine, value in ordered],
                axis=PlotAxis(unit, _COMPARED[name], 1024 if name == "memory" else 1000),
            )


def _figures(machine: Machine) -> list[Any]:
    """The compared figures; None for a type that the device does not support."""
    rates = (machine.compute.matrix.get(name) for name in ("bf16", "f8e4m3"))
    return [*rates, machine.memory.capacity, machine.memory.bandwidth]


def _values(machine: Machine) -> list[float | None]:
    return [None if each is None else float(each.value) for each in _figures(machine)]


def _texts(machine: Machine) -> list[str]:
    compared = ("" if each is None else figure_text(each) for each in _figures(machine))
    return [machine.name, machine.title, *compared, _network(machine)]


def _network(machine: Machine) -> str:
    return ", ".join(map(_level, machine.network))


@dataclass(frozen=True)
class MachineAnswer(Report):
    """All figures of a machine, each with its source."""

    machine: Machine

    @property
    def title(self) -> str:
        other = f", also {', '.join(self.machine.aliases)}" if self.machine.aliases else ""
        return f"{self.machine.name}{other}: {self.machine.title}"

    def as_json(self) -> dict[str, Any]:
        return _object(self.machine)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each figure."""
        return [
            {"figure": path, "value": figure_text(figure), "source": figure.source}
            for path, figure in self.machine.figures()
        ]

    def print(self, stream: TextIO) -> None:
        figures = (row.values() for row in self.rows())
        rows = table(self.title, "figure", "value", "source", rows=figures)
        rows.columns[2].justify = "left"
        out = console(stream, 170)
        out.print(rows)
        texts = map(_level_texts, self.machine.network)
        levels = table("Network, from the inside out", *_LEVEL_HEADS, rows=texts)
        levels.columns[1].justify = levels.columns[4].justify = "left"
        out.print(levels)
        for text in self._efficiency():
            out.print(text)

    def page(self) -> str:
        """Tables of all figures and of the levels of the network."""
        from stagec.output.page import TableRow, command, data_table, page, paragraphs, table

        body = [command(f"stagec machines {self.machine.name}"), data_table(self.rows())]
        body.append("<h2>Network, from the inside out</h2>")
        body.append(table(_LEVEL_HEADS, [TableRow(_level_texts(e)) for e in self.machine.network]))
        return page(self.title, [*body, "<h2>Efficiency</h2>", *paragraphs(self._efficiency())])

    def _efficiency(self) -> Iterator[str]:
        """The measurements to which the constants of each kind of work and level were fitted."""
        efficiency = self.machine.efficiency
        kinds = ("matmul", "attention", "memory", "sustained", "host", "interference")
        fits = {name: getattr(efficiency, name).fitted for name in kinds}
        fits |= {name: constants.fitted for name, constants in efficiency.network.items()}
        defaults = "not fitted: no measurements of this machine; defaults"
        for name, fitted in fits.items():
            yield f"efficiency of {name}: {fitted or defaults}"


_LEVEL_HEADS = "level", "kind", "ranks", "oversubscription", "reductions"


def _level_texts(level: Level) -> list[str]:
    ranks = "any" if level.ranks is None else str(level.ranks)
    adds = "its switches add" if level.reductions else ""
    return [level.name, level.kind, ranks, f"{level.oversubscription:g}", adds]
