"""The devices that jobs run on: texts as package data, one a device, each figure with its source.

So far a text says what memory a device has, and what of it no job gets.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ByteSize, ConfigDict, ValidationError

from stagec.support.diagnostics import error


class _Text(BaseModel):
    """A part of a text: every name in it is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(_Text):
    """Bytes, written with their unit (`80 GiB`), and where the figure is from."""

    value: ByteSize
    source: str


class Reserve(_Text):
    """Memory that no job gets, where it is known.

    `communicator` is what one communicator of the communication library holds, of the ranks of a
    node or more; each further one holds as much again (github.com/NVIDIA/nccl, issue 986).
    """

    driver: Figure | None = None
    context: Figure | None = None
    communicator: Figure | None = None


class Memory(_Text):
    """The memory of a device; its capacity is that of the board."""

    capacity: Figure
    reserve: Reserve = Reserve()


class Device(_Text):
    """A device. `name` is that of its text, `aliases` are other names that users know it by."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    memory: Memory

    def left(self, communicators: int) -> int:
        """Bytes that a job may use which has so many communicators."""
        reserve = self.memory.reserve
        once = (reserve.driver, reserve.context)
        held = sum(part.value for part in once if part is not None)
        each = reserve.communicator.value if reserve.communicator is not None else 0
        return self.memory.capacity.value - held - each * communicators


def read_device(name: str, text: str) -> Device:
    """A device of its text. Raises `DiagnosticError` for what is none, with the place in it."""
    file = f"{name}.toml"
    try:
        return Device.model_validate({"name": name, **tomllib.loads(text)})
    except tomllib.TOMLDecodeError as e:
        raise error(f"{file}: no TOML: {e}", remedy="write KEY = VALUE") from None
    except ValidationError as e:
        found = [f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in e.errors()]
        raise error(f"{file}: {'; '.join(found)}", remedy="see stagec/machines") from None


@cache
def devices() -> Mapping[str, Device]:
    """All devices that are shipped, by name, in alphabetical order."""
    found = sorted(f.name for f in files("stagec.machines").iterdir() if f.name.endswith(".toml"))
    names = [file.removesuffix(".toml") for file in found]
    folder = files("stagec.machines")
    return {n: read_device(n, folder.joinpath(f"{n}.toml").read_text("utf-8")) for n in names}


def find_device(name: str) -> Device | None:
    """The device of a name or an alias, in upper or lower case; None if there is none."""
    wanted = name.lower()
    return next((m for m in devices().values() if wanted in (m.name, *m.aliases)), None)
