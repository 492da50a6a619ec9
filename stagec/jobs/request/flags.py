"""The flags of statements and of the axes of the mesh: as options, as words of a command line, and
as the text of a strategy."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from stagec.ir_spec.strategy import STATEMENTS
from stagec.ir_spec.strategy.axes import AXES, EXPERTS
from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.mesh_flags import FLAGS as AXIS_FLAGS
from stagec.ir_spec.strategy.mesh_flags import OF_MESH
from stagec.ir_spec.strategy.part import FEED_FORWARD
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.request.expert_load import LoadFile
from stagec.jobs.request.option import AnyText, CommandOption, Kind, OneOf, Switch, Whole

#: The need of the flags that follow an axis in the order of flags: the axis itself, or experts.
_GROUPS = {"pp": "pp", "cp": "cp", "ep": EXPERTS}


def _in_order() -> Iterator[Flag]:
    """All flags in the order of a command line: an axis, then the flags that need it."""
    left = [flag for statement in STATEMENTS for flag in statement.flags]
    for axis in AXIS_FLAGS:
        yield axis
        need = _GROUPS.get(axis.name)
        yield from (flag for flag in left if need is not None and flag.needs[:1] == (need,))
    yield from OF_MESH.values()
    yield from (flag for flag in left if flag.needs[:1] not in [(n,) for n in _GROUPS.values()])


FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in _in_order()}
#: The flags of a job with one mesh, which sweeps and searches vary.
OF_ONE_MESH = {name: flag for name, flag in FLAGS.items() if flag.kind != "parts"}
#: The flags of statements, and of the order of the mesh.
SHORTHANDS = tuple(name for name in FLAGS if name not in AXES)


def option(flag: Flag) -> CommandOption:
    """The option of a flag."""
    multiple = flag.kind == "parts"
    metavar, alone = ("[on|off]", "on") if flag.kind == "switch" else (flag.metavar, "")
    about = flag.name, type_of(flag), flag.help, flag.default, metavar
    return CommandOption(*about, multiple=multiple, alone=alone, rare=flag.rare)


def type_of(flag: Flag) -> Kind[Any]:
    """The kind of values of a flag."""
    return Switch() if flag.kind == "switch" else _TYPES[flag.kind](flag)


def words(name: str, value: object) -> Iterator[str]:
    """The words of a command line for a value of an option: `--zero 3`, `--sp`, `--sp off`."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        if value:
            yield option
        elif name not in FLAGS or FLAGS[name].default:
            yield f"--no-{option[2:]}"
        else:
            yield from (option, "off")
        return
    if name in FLAGS and FLAGS[name].kind == "parts":
        for each in cast("tuple[object, ...]", value):
            yield from (option, str(each))
        return
    yield option
    if name in FLAGS and FLAGS[name].kind == "loads":
        yield json.dumps(value)
    elif isinstance(value, tuple):
        yield ",".join(map(str, cast("tuple[object, ...]", value)))
    else:
        yield str(value)


def strategy_text(request: FlagValues) -> str:
    """The text of the strategy that flags stand for."""
    serves = bool(request.flags.get("serve"))
    statements = (statement for statement in STATEMENTS if not (serves and statement.training))
    lines = (line for statement in statements for line in statement.text(request))
    body = "".join(f"  {line}\n" for line in lines)
    return f"stg.strategy @shorthand[mesh = @pod] {{\n{body}}}"


# -- types of values -------------------------------------------------------------------------------


class LayersType(Kind[tuple[int, ...]]):
    """`7,8*14,7`: numbers of layers, each with its number of repetitions."""

    name = "LAYERS"
    annotated = "str | Sequence[int]"

    def read(self, text: str) -> tuple[int, ...]:
        """The number of layers of each part."""
        layers: list[int] = []
        for part in text.split(","):
            size, star, times = (p.strip() for p in part.partition("*"))
            if not _is_count(size) or (star and not _is_count(times)):
                raise ValueError(f"'{part}' is neither a number of layers nor NUMBER*TIMES")
            layers += [int(size)] * (int(times) if star else 1)
        return tuple(layers)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 5


class Names(Kind[str]):
    """Comma-separated names: some of the choices, or without choices names of values."""

    name = "NAMES"
    annotated = "str | Sequence[str]"

    def __init__(self, choices: Collection[str]) -> None:
        self._choices = choices

    def read(self, text: str) -> str:
        """The names, without spaces; hyphens are underscores."""
        names = [n.strip().replace("-", "_") for n in text.split(",")] if text else []
        for name in names:
            if self._choices and name not in self._choices:
                raise ValueError(f"'{name}' is not one of {', '.join(self._choices)}")
            if not name.isidentifier():
                raise ValueError(f"'{name}' is not the name of a value, such as wq")
        return ",".join(names)


class Patterns(Kind[str]):
    """Comma-separated names and patterns."""

    name = "PATTERNS"
    annotated = "str | Sequence[str]"

    def read(self, text: str) -> str:
        """The text, unchanged."""
        return text


class AxisOrder(Names):
    """Comma-separated names of axes, each once."""

    def read(self, text: str) -> str:
        """The names in order, without spaces."""
        order = super().read(text)
        names = order.split(",")
        if len(set(names)) < len(names):
            raise ValueError(f"'{text}' has an axis twice")
        return order


class Ratio(Kind[Fraction]):
    """A fraction, such as `5/4` or `1.25`."""

    name = "RATIO"
    annotated = "float | str"

    def __init__(self, least: int | None) -> None:
        self._least = least

    def read(self, text: str) -> Fraction:
        """The fraction."""
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}|/0*[1-9][0-9]{0,5})?", text):
            raise ValueError(f"expects a fraction such as 5/4 or 1.25, found '{text}'")
        ratio = Fraction(text)
        if self._least is not None and ratio < self._least:
            raise ValueError(f"expects {self._least} or more, found {text}")
        return ratio


@dataclass(frozen=True, slots=True)
class PartText:
    """`encoder=e: tp=2,dp=2`: the name of a part, the value that it computes, and its flags."""

    name: str
    value: str
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (f": {self.flags}" if self.flags else "")


class PartFlag(Kind[PartText]):
    """`NAME=VALUE`, or `NAME=VALUE: FLAGS`."""

    name = "PART"

    def read(self, text: str) -> PartText:
        """The part."""
        head, _, flags = text.partition(":")
        name, _, of = (word.strip() for word in head.partition("="))
        of = of.removeprefix("%")
        if not (_is_name(name) and (_is_name(of) or of == FEED_FORWARD)):
            raise ValueError(f"expects NAME=VALUE: FLAGS, as in 'encoder=e: tp=2', found '{text}'")
        return PartText(name, of, flags.strip())


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier()


_TYPES: Mapping[str, Callable[[Flag], Kind[Any]]] = {
    "int": lambda flag: Whole(flag.least, flag.most),
    "choice": lambda flag: OneOf(flag.choices),
    "text": lambda flag: AnyText("schedules" if flag.name == "schedule" else ""),
    "names": lambda flag: Names(flag.choices),
    "patterns": lambda flag: Patterns(),
    "order": lambda flag: AxisOrder(flag.choices),
    "ratio": lambda flag: Ratio(flag.least),
    "layers": lambda flag: LayersType(),
    "loads": lambda flag: LoadFile(),
    "parts": lambda flag: PartFlag(),
}
