"""`--machine NAME|FILE`: the machine that a command asks about, and how its figures are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.output.common import remember
from stagec.support.source import Source

if TYPE_CHECKING:
    from stagec.machines import Machine

F = TypeVar("F", bound=Callable[..., Any])


def machine_of(given: str) -> Machine:
    """The machine of a name, an alias or a file. Raises `DiagnosticError` for what is none."""
    from stagec.machines import file_text, is_file, load_machine, read_machine

    if not is_file(given):
        return load_machine(given)
    path = Path(given)
    source = remember(Source(given, file_text(path)))
    return read_machine(path.stem, source.text, given)


class MachineType(click.ParamType["Machine"]):
    """`h100-sxm`, an alias such as `h100`, or a file."""

    name = "NAME|FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Machine:
        """The machine."""
        return machine_of(str(value))


def machine_option(text: str, required: bool = False) -> Callable[[F], F]:
    """`--machine`, with its help in this command."""
    return click.option("--machine", type=MachineType(), required=required, help=text)


def captured(machine: Machine) -> Machine:
    """The machine for steps of serving, which engines capture as graphs: a host launches each as a
    whole, and does not hold devices up."""
    return machine.changed({"efficiency.host.issue": 0.0, "efficiency.network.check": 0.0})
