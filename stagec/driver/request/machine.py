"""`--machine NAME|FILE`: the machine that a command asks about, and how its figures are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.output.common import remember, report
from stagec.driver.request import completion
from stagec.support.diagnostics import Diagnostic
from stagec.support.source import UNKNOWN, Source

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

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

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names of machines, and files."""
        return completion.machines(ctx, param, incomplete)


def machine_option(text: str, required: bool = False) -> Callable[[F], F]:
    """`--machine`, with its help in this command."""
    return click.option("--machine", type=MachineType(), required=required, help=text)


def graphs_option(function: F) -> F:
    """Give a command `--graphs`."""
    return click.option(
        "--graphs/--no-graphs",
        default=True,
        help="Of --serve: whether steps are captured as graphs, as engines do, or launched op by "
        "op.",
    )(function)


#: Constants without which a machine does products, attention and copies as no device does in a
#: step: at the rate of its best kernels.
_OF_STEPS = ("matmul", "attention", "memory", "sustained")


def tell_unfitted(machines: Iterable[Machine]) -> None:
    """Remark on the machines whose constants no measurement gave: their steps come out shorter than
    those of machines that were measured. A roofline is an assumption that its text states."""
    for machine in {m.name: m for m in machines}.values():
        found = machine.efficiency
        if found.kernels == "roofline":
            continue
        names = [n for n in _OF_STEPS if not getattr(found, n).fitted]
        if names:
            told = (
                f"{machine.name} has defaults for {', '.join(names)}, not measured values: its "
                "steps come out too short beside those of machines that were measured "
                f"('stagec machines {machine.name}')"
            )
            report(Diagnostic(told, UNKNOWN, "remark"))
