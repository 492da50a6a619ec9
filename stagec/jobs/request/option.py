"""Options of the command line, of job files and of Python calls: a name, the kind of its values,
and a help text. Commands turn these records into click options; the Python interface and job files
read values by them."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from stagec.jobs.request.other_tools import flag_here
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean, written_out

T_co = TypeVar("T_co", covariant=True)
_AS_FLAGS = "flags are those of the command line, with underscores for dashes"
#: The remedy for a wrong value.
AS_THERE = "give it as on the command line: see --help-all of the command"
_YES, _NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
#: The words for a boolean.
YES_OR_NO = (*_YES, *_NO)


class Kind(ABC, Generic[T_co]):
    """The kind of values of an option. `name` stands for a value in the help; `completes` names the
    values that a shell completes: `models`, `machines`, `presets`, `stacks`; `annotated` is the
    type of values in Python."""

    name = "TEXT"
    completes = ""
    annotated = "str"

    def annotation(self) -> str:
        """The type of values in Python calls, as Python writes it."""
        return self.annotated

    @abstractmethod
    def read(self, text: str) -> T_co:
        """The value of a text. Raises `ValueError` with the expected form."""

    def of(self, given: Any) -> T_co:
        """The value of an argument in Python, which may also be a text as on the command line.
        Raises `ValueError`."""
        return self.read(text_of(given))

    def text(self, value: Any) -> str:
        """The text that is read as this value."""
        return text_of(value)


class AnyText(Kind[str]):
    """Any text."""

    def __init__(self, completes: str = "") -> None:
        self.completes = completes

    def read(self, text: str) -> str:
        return text

    def of(self, given: Any) -> str:
        if isinstance(given, bool):
            raise ValueError(f"expects a text, found {given}")
        return super().of(given)


class File(Kind[Path]):
    """The path of a file or a folder."""

    name = "PATH"
    annotated = "str | Path"

    def read(self, text: str) -> Path:
        return path_of(text)

    def of(self, given: Any) -> Path:
        if not isinstance(given, str | os.PathLike):
            raise ValueError(f"expects a path, found {given!r:.60}")
        return super().of(given)


class Switch(Kind[bool]):
    """On or off."""

    name = "BOOLEAN"
    annotated = "bool"

    def read(self, text: str) -> bool:
        if (word := text.strip().lower()) in YES_OR_NO:
            return word in _YES
        raise ValueError(f"'{text}' is not a valid boolean: write on or off")

    def of(self, given: Any) -> bool:
        if isinstance(given, str):
            return self.read(given)
        if given not in (True, False):
            raise ValueError(f"expects True or False, found {given!r:.60}")
        return bool(given)


@dataclass(frozen=True)
class Whole(Kind[int]):
    """An integer within inclusive bounds."""

    least: int | None = None
    most: int | None = None
    name = "N"
    annotated = "int"

    def read(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            hint = written_out(text)
            raise ValueError(f"'{text}' is not a valid integer{hint}.") from None
        if text.strip().startswith("0") and len(text.strip()) > 1:
            hint = f"write {number}, and large numbers without commas"
            raise ValueError(f"'{text}' is not a valid integer; {hint}.")
        below = self.least is not None and number < self.least
        if below or (self.most is not None and number > self.most):
            raise ValueError(f"{number} is not in the range {_range(self.least, self.most)}.")
        return number

    def of(self, given: Any) -> int:
        if isinstance(given, bool):
            raise ValueError(f"expects an integer, found {given}")
        return super().of(given)


@dataclass(frozen=True)
class Number(Kind[float]):
    """A number within inclusive bounds; with `above` the lower bound is exclusive."""

    least: float | None = None
    most: float | None = None
    above: bool = False
    name = "FLOAT"
    annotated = "float"

    def read(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"'{text}' is not a valid float.") from None
        below = self.least is not None and (
            not number >= self.least or (number == self.least and self.above)
        )
        if below or (self.most is not None and number > self.most):
            limits = _range(self.least, self.most, "<" if self.above else "<=")
            raise ValueError(f"{number} is not in the range {limits}.")
        return number


def _range(least: float | None, most: float | None, sign: str = "<=") -> str:
    if least is None:
        return f"x<={most}"
    return f"x{sign.replace('<', '>')}{least}" if most is None else f"{least}{sign}x<={most}"


#: Other names of element types.
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32"}


@dataclass(frozen=True)
class OneOf(Kind[str]):
    """One of several words; underscores may replace hyphens, as in texts of strategies."""

    choices: Sequence[str]

    def annotation(self) -> str:
        return f"Literal[{', '.join(map(json.dumps, self.choices))}]"

    def read(self, text: str) -> str:
        for spelled in (text, text.replace("_", "-")):
            if spelled in self.choices:
                return spelled
        near = did_you_mean(_DTYPES.get(text.lower(), text), self.choices)
        hint = f"; {near}" if near else "."
        raise ValueError(f"'{text}' is not one of {', '.join(map(repr, self.choices))}{hint}")


@dataclass(frozen=True)
class CommandOption:
    """An option. The value of a `multiple` option is a tuple, or the result of `merge`."""

    name: str  # the name in Python
    kind: Kind[Any]
    help: str
    default: Any = None
    metavar: str | None = None
    multiple: bool = False
    merge: Callable[[Sequence[Any]], Any] | None = None
    spelling: str = ""  # on the command line, if it is not --name
    alone: str = ""  # the value of the option without one
    rare: bool = False  # shown by --help-all, not by --help

    @property
    def words(self) -> tuple[str, ...]:
        """The spellings on a command line."""
        return tuple((self.spelling or "--" + self.name.replace("_", "-")).split())

    @property
    def usual(self) -> Any:
        """The value if the option is not given."""
        if not self.multiple:
            return self.default
        return self.merge(()) if self.merge is not None else ()

    def words_of(self, value: Any) -> Iterator[str]:
        """The words of a command line for a value; empty for the usual one."""
        if value == self.usual:
            return
        name = self.words[0]
        if isinstance(self.kind, Switch) and not self.alone:
            yield name if value else f"--no-{name[2:]}"
            return
        several = self.multiple and self.merge is None
        for each in cast("Sequence[Any]", value) if several else (value,):
            yield from (name, self.kind.text(each))

    def value_of(self, given: Any) -> Any:
        """The value of an argument in Python or of a file. Raises `ValueError`."""
        if not self.multiple:
            return self.kind.of(given)
        if self.merge is not None:
            return self.merge((self.kind.of(given),))
        return tuple(map(self.kind.of, values_in(given)))


def values_in(given: Any) -> list[Any]:
    """The values of a list, an array or another iterable; of a text or a number, that one."""
    return [given] if _is_one(given) else [*cast("Iterable[Any]", given)]


def _is_one(given: Any) -> bool:
    """Whether it is one value, as an array without axes is."""
    if isinstance(given, str | Path | Mapping) or getattr(given, "shape", None) == ():
        return True
    return not isinstance(given, Iterable)


def switch(
    name: str, help: str, spelling: str = "", *, default: bool | None = False, rare: bool = False
) -> CommandOption:
    """An option that is on if it is given; one whose default is not False also has a `--no-`
    form."""
    return CommandOption(name, Switch(), help, default, spelling=spelling, rare=rare)


def rare_option(
    name: str, kind: Kind[Any], help: str, default: Any = None, **more: Any
) -> CommandOption:
    """An option that `--help-all` shows, and `--help` does not; `more` are fields of
    `CommandOption`."""
    return CommandOption(name, kind, help, default, rare=True, **more)


def values_of(
    options: Iterable[CommandOption],
    flags: Mapping[str, Any],
    *,
    without: Collection[str] = (),
    where: str = "",
) -> tuple[dict[str, Any], frozenset[str]]:
    """The values of options by name, with the usual ones for options that `flags` does not give,
    and the names of those that it gives. A flag that is None is not given. The options `without`
    are left out. Raises `DiagnosticError`, with `where` before the message, for unknown flags and
    invalid values."""
    known = {option.name: option for option in options if option.name not in without}
    values = {name: option.usual for name, option in known.items()}
    explicit = set[str]()
    for name, value in flags.items():
        if name not in known:
            remedy = did_you_mean(name, known) or flag_here(name) or _AS_FLAGS
            raise error(f"{where}no flag '{name}'", remedy=remedy)
        if value is None:
            continue
        try:
            values[name] = known[name].value_of(value)
        except ValueError as problem:
            raise error(f"{where}{name}: {problem}", remedy=AS_THERE) from None
        explicit.add(name)
    return values, frozenset(explicit)


def path_of(text: str) -> Path:
    """The path of a file. Raises `ValueError` for a name that no file can have."""
    if "\0" in text:
        raise ValueError("the name of a file contains a NUL character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        about = f"the name of a file contains a character that is not text: {text!a:.60}"
        raise ValueError(about) from None
    return Path(text)


def text_of(value: Any) -> str:
    """A value in the form of the command line. Raises `ValueError` for bytes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, int) and isinstance(value, Real) and float(value).is_integer():
        return str(int(float(value)))
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return ",".join(n if v is None else f"{n}={text_of(v)}" for n, v in items)
    if isinstance(value, bytes):
        raise ValueError(f"expects a text or a number, found {value!r:.60}")
    return str(value) if _is_one(value) else ",".join(map(text_of, values_in(value)))


class SizesType(Kind[dict[str, int | None]]):
    """`NAME=VALUE,...`; with `open_names`, a name may stand alone."""

    name = "NAME=VALUE,..."
    annotated = "str | Mapping[str, int | None]"

    def __init__(self, *, open_names: bool = False) -> None:
        self._open = open_names

    def read(self, text: str) -> dict[str, int | None]:
        """The values by name."""
        sizes: dict[str, int | None] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, number = (p.strip() for p in part.partition("="))
            if not name.isidentifier() or not name.isascii():
                comma = "; write numbers without commas" if re.fullmatch("[0-9]{3}", part) else ""
                raise ValueError(f"'{part}' is not NAME=VALUE{comma}")
            if name in sizes:
                raise ValueError(f"{name} is given twice")
            if not equals and self._open:
                sizes[name] = None
                continue
            if not equals:
                raise ValueError(f"'{part}' is not NAME=VALUE")
            digits = number.replace("_", "")
            if (
                not digits.isascii()
                or not digits.isdigit()
                or len(digits) > 19
                or digits[0] == "0"
                or not 0 < int(digits) < 1 << 63
            ):
                expected = f"{name} expects a positive integer below 2^63"
                hint = written_out(number)
                if re.fullmatch("0[0-9]{1,18}", number):
                    hint = f"; write {int(number)}, and large numbers without commas"
                raise ValueError(f"{expected}, found '{number}'{hint}")
            sizes[name] = int(digits)
        return sizes

    def of(self, given: Any) -> dict[str, int | None]:
        if not isinstance(given, str | Mapping):
            raise ValueError(f"expects a dictionary such as {{'L': 4}}, found {given!r:.60}")
        return self.read(text_of(given))


_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s|min|h)?")
_SECONDS = Number(0, above=True)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


class TimeType(Kind[float]):
    """`500ms`, `0.5s` or `0.5`, with `zero` also `0s`, as seconds."""

    name = "TIME"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def read(self, text: str) -> float:
        """The seconds."""
        match = _TIME.fullmatch(text.strip())
        if match is None or (float(match[1]) == 0 and not self._zero):
            raise ValueError(f"expects a time such as 30ms or 0.5s, found '{text}'")
        return float(match[1]) * _UNITS[match[2] or "s"]

    def of(self, given: Any) -> float:
        """The seconds of a text, or of a number of them."""
        return self.read(given) if isinstance(given, str) else _SECONDS.of(given)

    def text(self, value: Any) -> str:
        return f"{value:.12f}".rstrip("0").rstrip(".") + "s"


#: The plug-ins that a command loads.
PLUGIN = CommandOption("plugin", File(), "Load a plug-in file.", metavar="FILE", multiple=True)
