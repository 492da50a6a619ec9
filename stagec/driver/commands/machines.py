"""`stagec machines`: the devices and networks that are known, with their sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from stagec.driver.shell import completion
from stagec.driver.shell.session import log, the_session
from stagec.driver.shell.show import write_json
from stagec.jobs.request.machine import machine_of
from stagec.machines import Level, Machine, figure_text, machines


@click.command("machines")
@click.argument(
    "name", metavar="[NAME|FILE]", required=False, shell_complete=completion.COMPLETERS["machines"]
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, or one object.")
def command(name: str | None, as_json: bool) -> None:
    """List the machines, or print every figure of one with its source. A file of your own is
    checked; docs/machines.md says how to write one."""
    if name is not None:
        machine = machine_of(name, the_session())
        if as_json:
            write_json(_object(machine))
        else:
            _print_machine(machine)
    elif as_json:
        rows = [_object(m) for m in machines().values()]
        write_json(rows)
    else:
        _print_table(machines())


def _object(machine: Machine) -> dict[str, Any]:
    """The machine with values in bytes, bytes/s, FLOP/s, Hz and seconds."""
    return machine.model_dump(mode="json", by_alias=True)


def _print_table(known: Mapping[str, Machine]) -> None:
    from stagec.output.tables import console, table

    rows = table(
        "Machines", "name", "machine", "BF16", "FP8", "memory", "bandwidth", "network per rank"
    )
    rows.columns[1].justify = rows.columns[6].justify = "left"
    for m in known.values():
        fast = [m.compute.matrix.get(t) for t in ("bf16", "f8e4m3")]
        rates = ("" if rate is None else figure_text(rate) for rate in fast)
        memory = figure_text(m.memory.capacity), figure_text(m.memory.bandwidth)
        rows.add_row(m.name, m.title, *rates, *memory, ", ".join(map(_level, m.network)))
    console(sys.stdout, 170).print(rows)
    log("'stagec machines NAME' prints every figure with its source; a FILE is read and checked.")


def _level(level: Level) -> str:
    """`nvlink 450 GB/s (8)`."""
    ranks = "" if level.ranks is None else f" ({level.ranks})"
    return f"{level.name} {figure_text(level.bandwidth)}{ranks}"


def _print_machine(machine: Machine) -> None:
    from rich.markup import escape

    from stagec.output.tables import console, table

    other = f", also {', '.join(machine.aliases)}" if machine.aliases else ""
    rows = table(escape(f"{machine.name}{other}: {machine.title}"), "figure", "value", "source")
    rows.columns[2].justify = "left"
    for path, figure in machine.figures():
        rows.add_row(path, figure_text(figure), escape(figure.source))
    out = console(sys.stdout, 170)
    out.print(rows)
    levels = table("Network, from the inside out", "level", "kind", "ranks", "oversubscription", "")
    levels.columns[1].justify = levels.columns[4].justify = "left"
    for level in machine.network:
        ranks = "any" if level.ranks is None else str(level.ranks)
        adds = "its switches add" if level.reductions else ""
        levels.add_row(level.name, level.kind, ranks, f"{level.oversubscription:g}", adds)
    out.print(levels)
    for name, fitted in _records(machine):
        told = fitted or "not fitted: no measurements of this machine; defaults"
        out.print(f"efficiency of {name}: {told}", markup=False)


def _records(machine: Machine) -> Iterator[tuple[str, str]]:
    """What the constants of each kind of work and of each level were fitted on."""
    efficiency = machine.efficiency
    for name in ("matmul", "attention", "memory", "sustained", "host", "interference"):
        yield name, getattr(efficiency, name).fitted
    yield from ((name, constants.fitted) for name, constants in efficiency.network.items())
