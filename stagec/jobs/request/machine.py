"""The options of machines: `--machine NAME|FILE`, `--used-ranks` and `--graphs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.jobs.request.option import AnyText, CommandOption, Kind, switch
from stagec.jobs.session import Session
from stagec.support.diagnostics import error
from stagec.support.source import Source
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.machines import Machine

_NUMBER = re.compile(r"[0-9]{1,13}")


def machine_of(given: str, session: Session, used: Mapping[str, int] | None = None) -> Machine:
    """The machine with a name or alias, or in a file, with the `--used-ranks` of its levels. Raises
    `DiagnosticError` for an unknown one."""
    from stagec.machines import file_text, is_file, load_machine, read_machine

    if not is_file(given):
        return with_used(load_machine(given), used)
    path = Path(given)
    source = session.remember(Source(given, file_text(path)))
    return with_used(read_machine(path.stem, source.text, given), used)


def with_used(machine: Machine, used: Mapping[str, int] | None) -> Machine:
    """The machine with these numbers of used ranks by level. Raises `DiagnosticError`."""
    levels = [level.name for level in machine.network]
    for level in (level for level in used or {} if level not in levels):
        raise error(
            f"--used-ranks: machine {machine.name} has no network level '{level}'",
            remedy=did_you_mean(level, levels) or f"the levels are: {', '.join(levels)}",
        )
    return machine.changed({f"network.{level}.used": n for level, n in (used or {}).items()})


def used_text(sizes: Mapping[str, int]) -> str:
    """`nvlink=64`: the form of the option."""
    return ",".join(f"{level}={number}" for level, number in sizes.items())


class UsedRanks(Kind[Mapping[str, int]]):
    """`nvlink=64`, or several with commas."""

    name = "LEVEL=N"

    def read(self, text: str) -> Mapping[str, int]:
        """The numbers of ranks, by level."""
        used: dict[str, int] = {}
        for part in text.split(","):
            level, _, number = (text.strip() for text in part.partition("="))
            if not level or not _NUMBER.fullmatch(number) or level in used:
                raise ValueError(f"expects LEVEL=N such as nvlink=64, found '{part}'")
            used[level] = int(number)
        return used


USED_RANKS = CommandOption(
    "used_ranks",
    UsedRanks(),
    "How many ranks the job uses in each unit of a network level: nvlink=64 (default: the most "
    "that its groups divide, see docs/machines.md).",
)
GRAPHS = switch(
    "graphs",
    "With --serve: capture steps as graphs, as engines do, or launch op by op.",
    default=True,
)


def machine_options(text: str) -> tuple[CommandOption, CommandOption]:
    """`--machine` with the help of a command, and `--used-ranks`."""
    kind = AnyText("machines")
    return CommandOption("machine", kind, text, metavar="NAME|FILE"), USED_RANKS
