"""What a sweep goes over: values of a flag, a symbol or a figure of the machine, or configurations
named in a file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import click

from stagec.driver.output.common import read_source
from stagec.driver.request.arguments import text_of
from stagec.driver.request.flags import OF_ONE_MESH, type_of
from stagec.driver.request.job_file import key_place
from stagec.driver.request.machine import MachineType
from stagec.driver.request.ranges import RULE, is_range, values_of
from stagec.driver.request.sizes import SizesType
from stagec.driver.sweep.rows import Case
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.source import Source
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.machines import Machine

#: What can be swept, beside the sizes of symbols.
NAMES = (*OF_ONE_MESH, "preset", "ranks")
#: What can be swept where there is a machine, beside its figures.
OF_TIME = ("machine", "overlap")
_MACHINE = "machine."
_FACTOR = re.compile(r"x([0-9]{1,9}(?:\.[0-9]{1,9})?)")
#: What a column of named configurations is called.
NAMED = "name"
_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of an option, of a symbol, of `machine` or `overlap`, or of a figure of the machine,
    whose value is a text (`2 TB/s`, or `x2` for twice as much)."""

    name: str
    what: Literal["option", "symbol", "case", "figure"]
    value: Any

    def chosen(self, case: Case) -> Case:
        """The configuration with this value. Raises `DiagnosticError` for a figure that the machine
        does not have, or a value that is none."""
        options = case.options
        if self.what == "symbol":
            sizes = {**options.sizes, self.name: self.value}
            return replace(case, options=options.changed(sizes=sizes))
        if self.what == "option":
            given: dict[str, Any] = {self.name: self.value}
            explicit = options.explicit | {self.name}
            return replace(case, options=options.changed(**given, explicit=explicit))
        if self.what == "case":
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
    """One value of an axis: how it is shown, and what it sets."""

    shown: int | str
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """What is swept, and its values."""

    name: str
    choices: tuple[Choice, ...]

    @property
    def sets(self) -> frozenset[str]:
        """The names of all that its values set."""
        return frozenset(s.name for c in self.choices for s in c.settings)


class SweepType(click.ParamType[Axis]):
    """`tp=1,2,4` or `tp=1..4`, `S=4096,8192`, or a TOML file with a table for each of them."""

    name = "NAME=VALUE,...|FILE.toml"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Axis:
        """The axis."""
        text = str(value)
        if "=" not in text and text.endswith(_SUFFIX):
            return _read(text, param, ctx)
        name, _, rest = (part.strip() for part in text.partition("="))
        parts = [part.strip() for part in rest.split(",")]
        if not name or not all(parts):
            self.fail(f"'{value}' is neither NAME=VALUE,... nor a {_SUFFIX} file", param, ctx)
        texts = list(dict.fromkeys(t for part in parts for t in self._texts(part, param, ctx)))
        return _axis(name, texts, param, ctx)

    def _texts(
        self, part: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[str]:
        if not is_range(part):
            return (part,)
        return values_of(part) or self.fail(f"'{part}' has no values: {RULE}", param, ctx)


def axis_of(name: str, values: object) -> Axis:
    """An axis of a list of values, or of their text. Raises `DiagnosticError`."""
    text = values if isinstance(values, str) else ",".join(map(text_of, _listed(values)))
    try:
        return SweepType().convert(f"{name}={text}", None, None)
    except click.BadParameter as problem:
        raise error(problem.message, remedy='as in {"tp": [1, 2, 4], "S": "4096..16384"}') from None


def _listed(values: object) -> Sequence[object]:
    listed = isinstance(values, list | tuple | range)
    return cast("Sequence[object]", values) if listed else [values]


def _axis(
    name: str, texts: Sequence[str], param: click.Parameter | None, ctx: click.Context | None
) -> Axis:
    settings = (_setting(name, text, param, ctx) for text in texts)
    choices = (Choice(_plain(t, s), (s,)) for t, s in zip(texts, settings, strict=True))
    return Axis(name, tuple(choices))


def _plain(text: str, setting: Setting) -> int | str:
    return setting.value if isinstance(setting.value, int) else text


def _types(timed: bool) -> dict[str, click.ParamType[Any]]:
    """How the values of what can be swept are read."""
    types: dict[str, click.ParamType[Any]] = {n: type_of(f) for n, f in OF_ONE_MESH.items()}
    types |= {"preset": click.STRING, "ranks": click.IntRange(min=1)}
    return types | ({"machine": MachineType(), "overlap": click.BOOL} if timed else {})


def _setting(
    name: str, text: str, param: click.Parameter | None, ctx: click.Context | None
) -> Setting:
    """A value as the flag of that name takes it. Raises `click.BadParameter`."""
    option = name.replace("-", "_")
    taken = {p.name for p in ctx.command.params} if ctx is not None else set(OF_TIME)
    timed = taken.issuperset(OF_TIME)  # `analyze` has a machine for one step only
    types = _types(timed)
    if option in types:
        value = types[option].convert(text, param, ctx)
        return Setting(option, "option" if option in NAMES else "case", value)
    if name.startswith(_MACHINE) and timed:
        return Setting(name.removeprefix(_MACHINE), "figure", text)
    if not name[:1].isupper():
        hint = did_you_mean(name, (n.replace("_", "-") for n in types)) or "tp=1,2"
        raise click.BadParameter(f"no flag '{name}' to sweep, nor a symbol; {hint}", ctx, param)
    return Setting(name, "symbol", SizesType()(f"{name}={text}", param, ctx)[name])


# -- configurations in a file ----------------------------------------------------------------------

_Tables: TypeAlias = Mapping[str, Mapping[str, object]]


def _read(path: str, param: click.Parameter | None, ctx: click.Context | None) -> Axis:
    """The configurations of a file. Raises `DiagnosticError` with the line that is wrong."""
    source = read_source(path)
    choices: list[Choice] = []
    for name, table in _tables(source).items():
        settings: list[Setting] = []
        for key, value in table.items():
            try:
                settings.append(_setting(key, text_of(value), param, ctx))
            except click.BadParameter as e:
                raise _wrong(source, name, key, e.message) from None
        choices.append(Choice(name, tuple(settings)))
    return Axis(NAMED, tuple(choices))


def _tables(source: Source) -> _Tables:
    try:
        found = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as e:
        raise error(f"{source.name}: no TOML: {e}", remedy=_EXAMPLE) from None
    if not found:
        raise error(f"{source.name}: no configurations", remedy=_EXAMPLE)
    for name, table in found.items():
        if not isinstance(table, dict):
            raise _wrong(source, "", name, f"expected a table of flags, found {table!r}")
    return cast(_Tables, found)


_EXAMPLE = "write a table for each configuration: [fsdp], and below it zero = 3 and B = 1024"


def _wrong(source: Source, table: str, key: str, message: str) -> DiagnosticError:
    return error(message, key_place(source, table, key), remedy=_EXAMPLE)


def conflicts(axes: Sequence[Axis]) -> Iterator[str]:
    """The names that several axes set."""
    seen: set[str] = set()
    for axis in axes:
        yield from sorted(seen & axis.sets)
        seen |= axis.sets
