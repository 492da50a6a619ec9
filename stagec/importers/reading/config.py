"""A configuration whose keys are read with checks: errors point at the key.

A family's reader asks for each key that its computation depends on; `finish` refuses what nobody
has asked for, so that no key that changes the computation is overlooked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeGuard, TypeVar

from stagec.importers.reading.json_text import Json, JsonText, Member, Object
from stagec.importers.reading.keys import OFF, SIZES, has_no_effect
from stagec.support.diagnostics import Diagnostic, DiagnosticError, DiagnosticList, error
from stagec.support.source import FileLoc
from stagec.support.suggest import did_you_mean

T = TypeVar("T")
#: Largest size unless a reader says otherwise: above all widths and vocabularies.
MAX_SIZE = 1 << 24
#: Largest number: above all bases and factors.
MAX_NUMBER = 1 << 48
#: Most layers; published models have up to a few hundred.
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Ignored:
    """Keys that are taken as left out: those with these names and, where there is a list for what
    is then said of them, all that no reader asks for."""

    keys: Collection[str] = ()
    unknown: list[Diagnostic] | None = None


class Config:
    """One object of a configuration file; `where` is its key, with a dot, or empty. `among` is what
    is to stand among the tokens of a language model that is read from it.

    Every reader takes several names of a key, as configurations have them, and reads the first one
    that is there. `null` is as good as a key that is left out, but not in the place of a size that
    every model has. A reader without a default raises
    `DiagnosticError` where no key is there; all raise it for a value of another kind.
    """

    def __init__(
        self,
        text: JsonText,
        members: Object,
        where: str = "",
        at: int = 0,
        ignored: Ignored | None = None,
    ) -> None:
        self._text, self._where, self._at = text, where, at
        self._ignored = ignored or Ignored()
        self._members = {k: m for k, m in members.items() if not self._is_ignored(k)}
        self._asked: set[str] = set()
        self.among: object = None

    def _is_ignored(self, key: str) -> bool:
        return key in self._ignored.keys or self._where + key in self._ignored.keys

    @property
    def asked(self) -> frozenset[str]:
        """The keys that have been asked for so far."""
        return frozenset(self._asked)

    # -- what there is -----------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """The keys that are there."""
        return tuple(self._members)

    @property
    def file(self) -> str:
        """The name of the file."""
        return self._text.source.name

    def has(self, *keys: str) -> bool:
        """Whether one of the keys is there, with a value other than null."""
        return self._value(keys) is not None

    def is_list(self, key: str) -> bool:
        """Whether a key has a list."""
        return isinstance(self._value([key]), list)

    def is_text(self, key: str) -> bool:
        """Whether a key has a string."""
        return isinstance(self._value([key]), str)

    def length(self, key: str, *, default: int) -> int:
        """How many elements the list of a key has."""
        value = self._value([key])
        return len(value) if isinstance(value, list) else default

    def names(self, *keys: str) -> bool:
        """Whether one of the keys is there, be it with null."""
        self._asked.update(keys)
        return any(key in self._members for key in keys)

    def _first(self, keys: Iterable[str]) -> tuple[str, Json]:
        """The first of the keys that is there, with its value; an empty one with None where none
        is. All of them count as asked for."""
        keys = list(keys)
        self._asked.update(keys)
        values = ((key, self._members[key].value) for key in keys if key in self._members)
        return next(((key, value) for key, value in values if value is not None), ("", None))

    def _value(self, keys: Iterable[str]) -> Json:
        return self._first(keys)[1]

    # -- readers -----------------------------------------------------------------------------------

    def size(self, *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A positive integer."""
        return self._integer(keys, default, 1, most)

    def count(
        self, *keys: str, default: int | None = None, least: int = 0, most: int = MAX_SIZE
    ) -> int:
        """An integer from `least` on."""
        return self._integer(keys, default, least, most)

    def side(self, key: str, *, default: int) -> int:
        """A positive integer, or a list of two that are the same: height and width."""
        if not self.is_list(key):
            return self.size(key, default=default)
        height, width = self.sizes(key, length=2, least=1)
        if height != width:
            raise self.refuse(key, f"is {height} x {width}, but only squares are modeled")
        return height

    def layers(self, *keys: str, default: int | None = None) -> int:
        """A number of layers."""
        return self._integer(keys or ("num_hidden_layers",), default, 1, MAX_LAYERS)

    def _integer(self, keys: Sequence[str], default: int | None, least: int, most: int) -> int:
        key, value = self._first(keys)
        if value is None:
            for key in SIZES.intersection(keys):
                self.expect_value(key)
            return self._default(keys, default)
        if not _is_integer(value, least, most):
            raise self.wrong(key, f"an integer from {least} to {most:,}")
        return value

    def expect_value(self, key: str) -> None:
        """Refuse null for a size whose class has no model without a value."""
        if key in self._members and self._members[key].value is None:
            remedy = f"give '{key}' a value, or leave the key out for the default of its class"
            raise self.wrong(key, "an integer", remedy)

    def every(self, *keys: str, default: int) -> int:
        """How often something comes: an integer, or a word of letters such as LLLG, whose last one
        differs from the others."""
        key, word = self._first(keys)
        if isinstance(word, str):
            if not 1 < len(word) <= MAX_LAYERS or word != word[0] * (len(word) - 1) + word[-1]:
                raise self.wrong(key, "an integer, or a word such as 'LLLG'")
            return len(word)
        return self.size(*keys, default=default)

    def ratio(self, *keys: str, default: int | Fraction | None = None) -> Fraction:
        """A finite number, exact, of a magnitude up to `MAX_NUMBER`."""
        key, value = self._first(keys)
        if value is None:
            return Fraction(self._default(keys, None if default is None else Fraction(default)))
        number = _number(value)
        if number is None:
            raise self.wrong(key, "a number")
        if abs(number) > MAX_NUMBER:
            raise self.wrong(key, f"a number up to {MAX_NUMBER}")
        return number

    def positive(self, key: str, *, default: int | None = None) -> Fraction:
        """A number above 0."""
        number = self.ratio(key, default=default)
        if number <= 0:
            raise self.wrong(key, "a positive number")
        return number

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """true or false."""
        return self._of_type(keys, bool, "true or false", default)

    def word(self, *keys: str, among: Collection[str], default: str | None = None) -> str:
        """One of several words."""
        key, value = self._first(keys)
        if value is None:
            return self._default(keys, default)
        if not isinstance(value, str) or value not in among:
            hint = did_you_mean(value, among) if isinstance(value, str) else None
            raise self.wrong(key, f"one of {', '.join(map(repr, among))}", hint)
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        """A string."""
        return self._of_type(keys, str, "a string", default)

    def _of_type(self, keys: Sequence[str], kind: type[T], what: str, default: T | None) -> T:
        key, value = self._first(keys)
        if value is None:
            return self._default(keys, default)
        if not isinstance(value, kind):
            raise self.wrong(key, what)
        return value

    def sizes(
        self, *keys: str, length: int | None = None, least: int = 0, most: int = MAX_SIZE
    ) -> tuple[int, ...]:
        """A list of integers, of a length if one is given; () where no key is there."""
        values = self._list(keys, length)
        integers = tuple(v for v in values if _is_integer(v, least, most))
        if len(integers) < len(values):
            raise self.wrong(keys[0], f"a list of integers from {least} to {most:,}")
        return integers

    def ratios(self, *keys: str, length: int | None = None) -> tuple[Fraction, ...]:
        """A list of finite numbers, exact; () where no key is there."""
        values = self._list(keys, length)
        numbers = tuple(number for v in values if (number := _number(v)) is not None)
        if len(numbers) < len(values):
            raise self.wrong(keys[0], "a list of numbers")
        if any(abs(number) > MAX_NUMBER for number in numbers):
            raise self.wrong(keys[0], f"a list of numbers up to {MAX_NUMBER}")
        return numbers

    def words(
        self, *keys: str, among: Collection[str], length: int | None = None
    ) -> tuple[str, ...]:
        """A list of words, of a length if one is given; () where no key is there."""
        values = self._list(keys, length)
        words = tuple(v for v in values if isinstance(v, str) and v in among)
        if len(words) < len(values):
            raise self.wrong(keys[0], f"a list of {', '.join(map(repr, among))}")
        return words

    def kinds(
        self, *keys: str, names: Mapping[str, str], length: int | None = None
    ) -> tuple[str, ...]:
        """A list of words of which several may mean the same kind, by what they mean."""
        return tuple(names[word] for word in self.words(*keys, among=names, length=length))

    def lists(self, *keys: str) -> int:
        """How many elements a list of lists has; 0 where no key is there."""
        values = self._list(keys, None)
        if not all(isinstance(value, list) for value in values):
            raise self.wrong(keys[0], "a list of lists")
        return len(values)

    def strings(self, *keys: str) -> tuple[str, ...]:
        """A list of strings; () where no key is there."""
        values = self._list(keys, None)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(keys[0], "a list of strings")
        return tuple(value for value in values if isinstance(value, str))

    def labels(self) -> int:
        """How many classes there are, by `id2label` or `num_labels`; two where there is neither, as
        configuration classes have it."""
        names = self._value(["id2label"])
        if isinstance(names, dict) and names:
            return len(names)
        return self.size("num_labels", default=2)

    def _list(self, keys: Sequence[str], length: int | None) -> list[Json]:
        key, value = self._first(keys)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        if length is not None and len(value) != length:
            message = f"'{self._where}{key}' has {len(value)} elements, expected {length}"
            raise error(message, self.place(key), remedy=f"give {length} elements")
        return value

    def section(self, *keys: str) -> Config | None:
        """The configuration in a key; None where no key is there. The reader of it finishes it."""
        key, value = self._first(keys)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        at = self._members[key].value_at
        return Config(self._text, value, f"{self._where}{key}.", at, self._ignored)

    def merge(self, *keys: str) -> None:
        """Read the members of the objects in these keys as members of this one, unless it has one
        of that name."""
        for key in keys:
            inner = self.section(key)
            if inner is not None:
                self._members = inner._members | self._members

    def drop(self, key: str) -> bool:
        """Take a key as left out; whether it was there, with a value other than null."""
        is_there = self.has(key)
        self._members.pop(key, None)
        return is_there

    def inherit(self, other: Config, *keys: str) -> None:
        """Take the members of another configuration, where it has some, for those of this one."""
        for key in keys:
            if other.has(key):
                self._members[key] = other._members[key]

    def only(self, key: str, *values: Json, why: str = "is not modeled") -> None:
        """Refuse other values than these of a key that is present and not null."""
        value = self._value([key])
        if value is None or any(_same(value, v) for v in values):
            return
        known = " or ".join(map(_shown, values)) or "null"
        raise error(
            f"'{self._where}{key}' is {_shown(value)}, which {why}: expected {known}",
            self.place(key),
            remedy=self._ignore(key),
        )

    def fixed(self, **values: Json) -> None:
        """Keys of each of which no other value than this one can be read, as in `only`."""
        for key, value in values.items():
            self.only(key, value)

    def restates(self, value: bool, *keys: str) -> None:
        """Keys, each true or false, by which a configuration says what its family does anyway."""
        for key in self._members.keys() - self._asked:
            if key in keys:
                self.only(key, value, why="its family does not do")

    def skip(self, *keys: str) -> None:
        """Keys of this family that do not change the computation."""
        self._asked.update(keys)

    # -- errors ------------------------------------------------------------------------------------

    def place(self, key: str) -> FileLoc:
        """Where a key stands; the beginning of the object if it is not there."""
        member = self._members.get(key)
        if member is None:
            return self._text.place(self._at)
        return self._text.place(member.key_at, len(key) + 2)

    def wrong(self, key: str, expected: str, remedy: str | None = None) -> DiagnosticError:
        """The error of a key whose value is of another kind."""
        member = self._members.get(key)
        value = _shown(member.value) if member else "nothing"
        return error(
            f"'{self._where}{key}' is {value}, expected {expected}",
            self.place(key),
            remedy=remedy
            or "correct the value; see the config.json that the model was published with",
        )

    def refuse(self, key: str, message: str) -> DiagnosticError:
        """The error of a key whose value does not go with the others."""
        return error(f"'{self._where}{key}' {message}", self.place(key), remedy=self._ignore(key))

    def divides(self, key: str, number: int, whole: int, what: str = "") -> None:
        """Refuse the number of a key if it does not divide another one, of `what`. Raises
        `DiagnosticError`."""
        if whole % number:
            raise self.refuse(key, f"is {number}, which does not divide {whole} {what}".rstrip())

    def _default(self, keys: Sequence[str], default: T | None) -> T:
        if default is not None:
            return default
        suggestion = did_you_mean(keys[0], self._members)
        raise error(
            f"the key '{self._where}{keys[0]}' is missing",
            self._text.place(self._at),
            remedy=suggestion or f'add it: "{keys[0]}": VALUE',
        )

    def finish(self) -> None:
        """Refuse the keys that nobody has asked for and that may change the computation, or remark
        on them where they are taken as left out."""
        problems = DiagnosticList()
        for key, member in self._members.items():
            known = key in self._asked or has_no_effect(key)
            if known or _is_off(key, member.value):
                continue
            if self._ignored.unknown is None:
                problems.add(self._unknown(key, member))
            else:
                self._ignored.unknown.append(self._left_out(key, member))
        problems.check()

    def _unknown(self, key: str, member: Member) -> Diagnostic:
        suggestion = did_you_mean(key, self._asked - self._members.keys())
        ignore = self._ignore(key)
        return Diagnostic(
            f"unknown key '{self._where}{key}', which may change the computation: "
            f"{_shown(member.value)}",
            self.place(key),
            remedy=f"{suggestion} Otherwise, {ignore}" if suggestion else ignore,
        )

    def _left_out(self, key: str, member: Member) -> Diagnostic:
        message = f"ignored the unknown key '{self._where}{key}': "
        return Diagnostic(message + _shown(member.value), self.place(key), "remark")

    def _ignore(self, key: str) -> str:
        name = f"{self._where}{key}"
        return f"if it has no effect here, run stagec import --ignore-key {name} -o MODEL.stg"


def _is_off(key: str, value: Json) -> bool:
    """Whether a key says that the computation is the usual one."""
    return value is None or any(_same(value, off) for off in OFF.get(key, ()))


def _is_integer(value: Json, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Json) -> Fraction | None:
    """The number that a value is."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        return None
    return Fraction(value)


def _same(left: object, right: object) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _shown(value: Json) -> str:
    """A value in a message, shortened."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return f"{Decimal(value):.6g}"
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    text = f"{value!r}"
    return text if len(text) <= 60 else text[:57] + "..."
