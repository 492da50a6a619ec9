"""The option `--limit`: the memory limit of a rank, as a size or as the name of a device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from stagec.jobs.request.option import CommandOption, Kind
from stagec.support.diagnostics import Diagnostic

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The limit that stands for the machine of the job.
AT_HAND = "machine"
_UNITS = {letter: 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?(?:([KMGT])(iB|B)?|B?)")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit in bytes, or a device whose memory, less what is reserved, is the limit; `text` is
    the given text."""

    text: str
    size: int
    device: Machine | None = None
    remark: str = ""

    def room(self, mesh: Mapping[str, int], machine: Machine | None = None) -> int:
        """The bytes that a rank of a job on this mesh may hold: of a device, its memory less that
        of the driver, the context and the communicators, one for each axis. `machine` is that of
        the job, for the limit `machine`."""
        device = machine if self.text == AT_HAND else self.device
        return device.left(_communicators(mesh)) if device else self.size

    def remarks(self, mesh: Mapping[str, int] | None = None) -> list[Diagnostic]:
        """Remarks on how the limit was read, and on the memory of a device that is reserved, for a
        job on this mesh."""
        remarks = [self.remark] if self.remark else []
        if self.device is not None:
            remarks.append(_described(self.device, mesh))
        return [Diagnostic(text, severity="remark") for text in remarks]


def _communicators(mesh: Mapping[str, int]) -> int:
    return sum(size > 1 for size in mesh.values())


def _described(device: Machine, mesh: Mapping[str, int] | None) -> str:
    """`h100-sxm has 80.00 GiB; 922.00 MiB (driver) ... are reserved: 77.80 GiB are left`."""
    from stagec.output.tables import bytes_text

    reserve = device.memory.reserve
    parts = {"driver": reserve.driver, "context": reserve.context}
    taken = [f"{bytes_text(int(s.value))} ({n})" for n, s in parts.items() if s is not None]
    unknown = [n for n, s in parts.items() if s is None]
    if reserve.communicator is None:
        unknown.append("communicators")
    else:
        times = f"{_communicators(mesh)} x " if mesh is not None else ""
        each = bytes_text(int(reserve.communicator.value))
        taken.append(f"{times}{each} (communicator of each axis of the mesh)")
    text = f"{device.name} has {bytes_text(int(device.memory.capacity.value))}"
    if taken:
        text += f"; {', '.join(taken)} are reserved"
    if taken and mesh is not None:
        text += f": {bytes_text(device.left(_communicators(mesh)))} are left"
    return text + (f"; not known, and not counted: {', '.join(unknown)}" if unknown else "")


class LimitType(Kind[Limit]):
    """`80GiB`, `80GB`, a number of bytes, or a device such as `h100`; also `machine` if `at_hand`,
    that is in a command with `--machine`."""

    name = "SIZE|DEVICE"

    def __init__(self, *, at_hand: bool = False) -> None:
        self._at_hand = at_hand

    def text(self, value: Limit) -> str:
        return value.text

    def read(self, text: str) -> Limit:
        """The limit."""
        if text == AT_HAND and self._at_hand:
            return Limit(text, 0)
        match = _SIZE.fullmatch(text)
        if match is not None and Fraction(match[1]):
            size = int(Fraction(match[1]) * _UNITS.get(match[2], 1))
            return Limit(text, size, remark="" if match[3] == "iB" else _unit_remark(match, size))
        if text[:1].isalpha():
            return _device(text)
        unit = _SIZE.fullmatch(text.upper().replace("IB", "iB"))
        hint = f"; did you mean {unit[0]}?" if unit else ""
        raise ValueError(f"expects a size such as 80GiB, or a device, found '{text}'{hint}")


class SizeType(Kind[int]):
    """`64GiB`: bytes."""

    name = "SIZE"
    annotated = "int | str"

    def read(self, text: str) -> int:
        """The bytes, at least one."""
        match = _SIZE.fullmatch(text)
        size = int(Fraction(match[1]) * _UNITS.get(match[2], 1)) if match is not None else 0
        if not size:
            raise ValueError(f"expects a size such as 64GiB, found '{text}'")
        return size

    def text(self, value: int) -> str:
        return str(value)


def _device(text: str) -> Limit:
    from stagec.machines import find_machine, machines, suggest_machine

    device = find_machine(text)
    if device is not None:
        return Limit(text, int(device.memory.capacity.value), device)
    hint = suggest_machine(text)
    raise ValueError(
        f"expects a size such as 80GiB, or a device, found '{text}';"
        f"{f' {hint}' if hint else ''} the devices are: {', '.join(machines())}"
    )


def _unit_remark(match: re.Match[str], size: int) -> str:
    """A remark on an ambiguous unit; empty for bytes with a unit, or from a mebibyte on."""
    if match[2] is None:
        plain = size < 1 << 20 and not match[0].endswith("B")
        return f"'{match[0]}' is taken as bytes: write {match[0]}GiB" if plain else ""
    exact = f"{match[1]}{match[2]}iB"
    return (
        f"'{match[0]}' is taken as {exact}, {size:,} bytes, as the makers of devices count memory; "
        "a plain number counts bytes"
    )


def limit_option(text: str, *, at_hand: bool = False) -> CommandOption:
    """`--limit` with the help of a command; with `at_hand` it also accepts `machine`."""
    return CommandOption("limit", LimitType(at_hand=at_hand), text)
