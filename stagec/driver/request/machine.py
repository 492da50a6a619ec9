"""`--machine NAME|FILE`: the machine that a command asks about, and how its figures are told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.output.common import remember, report
from stagec.driver.request import completion
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.source import UNKNOWN, Source
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stagec.machines import Machine

F = TypeVar("F", bound=Callable[..., Any])

#: Under these names the context of a command has its `--used-ranks`, and the text of its machine.
USED, GIVEN_MACHINE = "stagec.used-ranks", "stagec.machine"
_NUMBER = re.compile(r"[0-9]{1,13}")


def machine_of(given: str) -> Machine:
    """The machine of a name, an alias or a file, of which a command uses `--used-ranks`. Raises
    `DiagnosticError` for what is none."""
    from stagec.machines import file_text, is_file, load_machine, read_machine

    if not is_file(given):
        return _with_used(load_machine(given))
    path = Path(given)
    source = remember(Source(given, file_text(path)))
    return _with_used(read_machine(path.stem, source.text, given))


def _with_used(machine: Machine) -> Machine:
    """The machine with `--used-ranks` of the command that runs."""
    context = click.get_current_context(silent=True)
    used: Mapping[str, int] = context.meta.get(USED) or {} if context is not None else {}
    levels = [level.name for level in machine.network]
    for level in (level for level in used if level not in levels):
        raise error(
            f"--used-ranks: machine {machine.name} has no level '{level}'",
            remedy=did_you_mean(level, levels) or f"the levels are: {', '.join(levels)}",
        )
    return machine.changed({f"network.{level}.used": n for level, n in used.items()})


class MachineType(click.ParamType["Machine"]):
    """`h100-sxm`, an alias such as `h100`, or a file."""

    name = "NAME|FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Machine:
        """The machine."""
        if ctx is not None:
            ctx.meta[GIVEN_MACHINE] = str(value)
        return machine_of(str(value))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names of machines, and files."""
        return completion.machines(ctx, param, incomplete)


def machine_option(text: str, required: bool = False) -> Callable[[F], F]:
    """`--machine`, with its help in this command, and what of it is used."""
    option = click.option("--machine", type=MachineType(), required=required, help=text)
    return lambda function: option(used_option(function))


def used_option(function: F) -> F:
    """Give a command `--used-ranks`, of all machines that it names."""

    def keep(ctx: click.Context, param: click.Parameter, sizes: Mapping[str, int] | None) -> Any:
        ctx.meta[USED] = sizes
        return sizes

    return click.option(
        "--used-ranks",
        type=UsedRanks(),
        is_eager=True,  # before machines are read
        callback=keep,
        help="How many of the ranks that a unit of a level of the network joins the job uses: "
        "nvlink=64 (default: the most that its groups divide, see docs/machines.md).",
    )(function)


def used_text(sizes: Mapping[str, int]) -> str:
    """`nvlink=64`, as the option takes it."""
    return ",".join(f"{level}={number}" for level, number in sizes.items())


class UsedRanks(click.ParamType[Mapping[str, int]]):
    """`nvlink=64`, or several with commas."""

    name = "LEVEL=N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Mapping[str, int]:
        """The numbers of ranks, by level."""
        found: dict[str, int] = {}
        for part in str(value).split(","):
            level, _, number = (text.strip() for text in part.partition("="))
            if not level or not _NUMBER.fullmatch(number) or level in found:
                self.fail(f"expects LEVEL=N such as nvlink=64, found '{part}'", param, ctx)
            found[level] = int(number)
        return found


def graphs_option(function: F) -> F:
    """Give a command `--graphs`."""
    return click.option(
        "--graphs/--no-graphs",
        default=True,
        help="Of --serve: whether steps are captured as graphs, as engines do, or launched op by "
        "op.",
    )(function)


def tell_cautions(found: Iterable[str]) -> None:
    """Remark on what to know of an answer."""
    for text in found:
        report(Diagnostic(text, UNKNOWN, "remark"))
