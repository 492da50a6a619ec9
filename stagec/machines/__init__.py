"""The machines that jobs run on: one text per machine as package data, each figure with its source.

A text describes the compute units, memory and host link of a device, and the network that connects
devices, level by level; docs/machines.md describes the schema.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from stagec.machines import infragraph, reading
from stagec.machines.figures import figure_text
from stagec.machines.reading import file_text
from stagec.machines.schema import Level, Machine
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean, other_spelling

__all__ = [
    "Level",
    "Machine",
    "figure_text",
    "file_text",
    "files_of",
    "find_machine",
    "is_file",
    "load_machine",
    "machines",
    "read_machine",
]


@cache
def _texts() -> Mapping[str, str]:
    folder = files("stagec.machines")
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".toml"))
    return {f.removesuffix(".toml"): folder.joinpath(f).read_text("utf-8") for f in names}


@cache
def machines() -> Mapping[str, Machine]:
    """All machines that stagec includes, by name, in alphabetical order."""
    return {name: read_machine(name, text) for name, text in _texts().items()}


def machine_names() -> tuple[str, ...]:
    """The names of the machines; does not read their texts."""
    return tuple(_texts())


def find_machine(name: str) -> Machine | None:
    """The machine with a name or alias, in upper or lower case, or None."""
    wanted = name.lower()
    return next((m for m in machines().values() if wanted in (m.name, *m.aliases)), None)


def read_machine(name: str, text: str, given: str | None = None) -> Machine:
    """Read a machine text; `given` is the file that `--machine` names, if it comes from one. Raises
    `DiagnosticError` for an invalid text, with the location."""
    file = given or f"{name}.toml"
    folder = Path(file).parent

    def base(wanted: str) -> tuple[str, str]:
        if is_file(wanted):
            path = folder / wanted
            return str(path), file_text(path)
        stem = wanted if wanted in _texts() else _name_of(wanted)
        return f"{stem}.toml", _texts()[stem]

    tables = reading.bases(reading.parsed(text, file), file, text, base)
    machine = reading.checked(name, tables, file, text)
    return machine if given is None else machine.of_file(given)


def load_machine(given: str) -> Machine:
    """The machine with a name or alias, or from a file (a text with a slash or with the end
    `.toml`). `DEVICE+FILE` has the network of an InfraGraph file. Raises `DiagnosticError` for an
    unknown name and for an invalid file."""
    parts = infragraph.parts_of(given)
    if parts is not None:
        device, file = parts
        name = device if is_file(device) else _name_of(device)
        text = infragraph.machine_text(name, file, file_text(Path(file)))
        return read_machine(f"{Path(device).stem}+{Path(file).stem}", text).of_file(given)
    if is_file(given):
        path = Path(given)
        return read_machine(path.stem, file_text(path), given)
    return machines()[_name_of(given)]


def is_file(given: str) -> bool:
    """Whether a value of `--machine` is the path of a machine text."""
    return not infragraph.parts_of(given) and (given.endswith(".toml") or "/" in given)


def files_of(given: str) -> list[str]:
    """The files that a value of `--machine` names: a machine text, an InfraGraph file, both or
    none."""
    device, *network = infragraph.parts_of(given) or (given,)
    return [*([device] if is_file(device) else []), *network]


def _name_of(given: str) -> str:
    machine = find_machine(given)
    if machine is None:
        raise error(
            f"no machine '{given}'" if given else "the name of a machine is empty",
            remedy=suggest_machine(given)
            or f"give a file, or choose among {', '.join(machines())}",
        )
    return machine.name


def suggest_machine(given: str) -> str:
    """The question whether a machine of the library with another name is meant; empty if none is
    like it."""
    names = [n for m in machines().values() for n in (m.name, *m.aliases)]
    return did_you_mean(given.lower(), names) or other_spelling(given, names) or ""
