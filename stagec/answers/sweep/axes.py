"""The axes of a sweep: values of a flag, a symbol or a figure of the machine, or the configurations
of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from stagec.answers.sweep.rows import Case
from stagec.jobs.request.flags import OF_ONE_MESH, type_of
from stagec.jobs.request.job_file import key_place
from stagec.jobs.request.machine import machine_of, with_used
from stagec.jobs.request.option import AnyText, Kind, SizesType, Switch, Whole, text_of, values_in
from stagec.jobs.request.ranges import RULE, doubled_texts, is_range
from stagec.jobs.request.serving_flags import CACHES, STEP
from stagec.jobs.session import Session
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.limits import MAX_BYTES
from stagec.support.source import Source
from stagec.support.suggest import did_you_mean
from stagec.support.texts import read_text
from stagec.support.toml_text import toml_tables

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The options of a step of serving that can be swept: all but `step`, whose values have commas.
_OF_STEPS = {name: option.kind for name, option in {**STEP, **CACHES}.items() if name != "step"}
#: The options that can be swept, in addition to symbols.
NAMES = (*OF_ONE_MESH, *_OF_STEPS, "preset", "stack", "ranks")
_MACHINE = "machine."
_FACTOR = re.compile(r"x([0-9]{1,9}(?:\.[0-9]{1,9})?)")
#: The title of a column of named configurations.
NAMED = "name"
_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of an option, of a symbol, of a field of `Case`, or of a figure of the machine, which
    is a text (`2 TB/s`, or `x2` for twice as much)."""

    name: str
    kind: Literal["option", "symbol", "case", "figure"]
    value: Any

    def applied_to(self, case: Case) -> Case:
        """The configuration with this value. Raises `DiagnosticError` for a figure that the machine
        does not have, or an invalid value."""
        options = case.options
        if self.kind == "symbol":
            sizes = {**options.sizes, self.name: self.value}
            return replace(case, options=options.changed(sizes=sizes))
        if self.kind == "option":
            given: dict[str, Any] = {self.name: self.value}
            explicit = options.explicit | {self.name}
            return replace(case, options=options.changed(**given, explicit=explicit))
        if self.name == "machine":
            return replace(case, machine=with_used(self.value, case.used))
        if self.kind == "case":
            return replace(case, **{self.name: self.value})
        device = case.device or case.machine
        return replace(case, machine=self._machine(case.machine), device=device)

    def _machine(self, machine: Machine | None) -> Machine:
        if machine is None:
            raise error(
                f"--sweep {_MACHINE}{self.name} needs a machine", remedy="add --machine h100-sxm"
            )
        if factor := _FACTOR.fullmatch(self.value):
            return machine.scaled(self.name, float(factor[1]))
        return machine.changed({self.name: self.value})


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of an axis: its text or number in tables, and its settings."""

    shown: int | str
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a sweep: its name and values; `file` is the source of named configurations."""

    name: str
    choices: tuple[Choice, ...]
    file: str = ""

    @property
    def text(self) -> str:
        """The value of `--sweep`: `tp=1,2,4`, or the file of configurations."""
        shown = ",".join(str(choice.shown) for choice in self.choices)
        return self.file or f"{self.name}={shown}"

    @property
    def sets(self) -> frozenset[str]:
        """The names that its values set."""
        return frozenset(s.name for c in self.choices for s in c.settings)


class SweepType(Kind[Axis]):
    """`tp=1,2,4` or `tp=1..4`, `S=4096,8192`, or a TOML file with a table for each value."""

    name = "NAME=VALUE,...|FILE.toml"

    def __init__(self, *, timed: bool) -> None:
        self._timed = timed

    def read(self, text: str) -> Axis:
        """The axis."""
        if "=" not in text and text.endswith(_SUFFIX):
            return _read(text, timed=self._timed)
        name, _, rest = (part.strip() for part in text.partition("="))
        parts = [part.strip() for part in rest.split(",")]
        if not name or "=" not in text:
            raise ValueError(f"'{text}' is neither NAME=VALUE,... nor a {_SUFFIX} file")
        if not all(parts):
            raise ValueError(f"'{text}' lacks a value after '=' or ',', expected {name}=VALUE,...")
        texts = list(dict.fromkeys(t for part in parts for t in self._texts(part)))
        return _axis(name, texts, timed=self._timed)

    def _texts(self, part: str) -> Sequence[str]:
        if not is_range(part):
            return (part,)
        if not (texts := doubled_texts(part)):
            raise ValueError(f"'{part}' has no values: {RULE}")
        return texts


def axis_of(name: str, values: object) -> Axis:
    """An axis of a list of values, or of their text. Raises `DiagnosticError`."""
    try:
        text = values if isinstance(values, str) else ",".join(map(text_of, values_in(values)))
        return SweepType(timed=True).read(f"{name}={text}")
    except ValueError as problem:
        raise error(
            str(problem),
            remedy='give a list or its text, as in {"tp": [1, 2, 4], "S": "4096..16384"}',
        ) from None


def _axis(name: str, texts: Sequence[str], *, timed: bool) -> Axis:
    settings = (_setting(name, text, timed=timed) for text in texts)
    choices = (Choice(_plain(t, s), (s,)) for t, s in zip(texts, settings, strict=True))
    return Axis(name, tuple(choices))


def _plain(text: str, setting: Setting) -> int | str:
    return setting.value if isinstance(setting.value, int) else text


class _Machine(Kind["Machine"]):
    def read(self, text: str) -> Machine:
        return machine_of(text, Session())


def _types(timed: bool) -> dict[str, Kind[Any]]:
    """The types of the values of everything that can be swept."""
    types: dict[str, Kind[Any]] = {n: type_of(f) for n, f in OF_ONE_MESH.items()}
    types |= {**_OF_STEPS, "preset": AnyText(), "stack": AnyText(), "ranks": Whole(1)}
    return types | ({"machine": _Machine(), "overlap": Switch()} if timed else {})


def _setting(name: str, text: str, *, timed: bool) -> Setting:
    """A value in the form of the flag of that name; with `timed`, also of the machine. Raises
    `ValueError`."""
    option = name.replace("-", "_")
    types = _types(timed)
    if option in types:
        value = types[option].read(text)
        return Setting(option, "option" if option in NAMES else "case", value)
    if name.startswith(_MACHINE) and timed:
        return Setting(name.removeprefix(_MACHINE), "figure", text)
    if not name[:1].isupper():
        hint = did_you_mean(name, (n.replace("_", "-") for n in types)) or "such as tp=1,2"
        raise ValueError(f"'{name}' is neither a flag nor a symbol; {hint}")
    return Setting(name, "symbol", SizesType().read(f"{name}={text}")[name])


# -- configurations in a file ----------------------------------------------------------------------

_Tables: TypeAlias = Mapping[str, Mapping[str, object]]


def _read(path: str, *, timed: bool) -> Axis:
    """The configurations of a file. Raises `DiagnosticError` at the line of the problem."""
    source = read_text(path, MAX_BYTES)
    choices: list[Choice] = []
    for name, table in _tables(source).items():
        settings: list[Setting] = []
        for key, value in table.items():
            try:
                settings.append(_setting(key, text_of(value), timed=timed))
            except ValueError as e:
                raise _wrong(source, name, key, str(e)) from None
        choices.append(Choice(name, tuple(settings)))
    return Axis(NAMED, tuple(choices), path)


def _tables(source: Source) -> _Tables:
    tables = toml_tables(source, _EXAMPLE)
    if not tables:
        raise error(f"{source.name} has no configurations", remedy=_EXAMPLE)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise _wrong(source, "", name, f"expected a table of flags, found {table!r}")
    return cast(_Tables, tables)


_EXAMPLE = "write a table for each configuration: [fsdp], and below it zero = 3 and B = 1024"


def _wrong(source: Source, table: str, key: str, message: str) -> DiagnosticError:
    return error(message, key_place(source, table, key), remedy=_EXAMPLE)


def conflicts(axes: Sequence[Axis]) -> Iterator[str]:
    """The names that more than one axis sets."""
    seen: set[str] = set()
    for axis in axes:
        yield from sorted(seen & axis.sets)
        seen |= axis.sets
