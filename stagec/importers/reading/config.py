"""A configuration whose keys are read with checks; errors point at the key.

The reader of a family reads each key on which its computation depends; `finish` refuses keys that
were not read, so that no key that changes the computation is overlooked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeGuard, TypeVar

from stagec.importers.reading.json_text import Json, JsonText, Member, Object
from stagec.importers.reading.keys import OF_SECTIONS, OFF, SIZES, has_no_effect
from stagec.ir.expr import MAX_INTEGER
from stagec.support.diagnostics import Diagnostic, DiagnosticError, DiagnosticList, error
from stagec.support.source import FileLoc
from stagec.support.suggest import did_you_mean

T = TypeVar("T")
#: The default bound of sizes, above all widths and vocabularies.
MAX_SIZE = 1 << 24
#: The bound of other numbers, above all bases and factors.
MAX_NUMBER = 1 << 48
#: The bound of layers; published models have up to a few hundred.
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Ignored:
    """Keys that are treated as absent: those with these names and, if there is a list `unknown` for
    their remarks, all keys that no reader reads."""

    keys: Collection[str] = ()
    unknown: list[Diagnostic] | None = None


class Config:
    """An object of a configuration file; `where` is its key, with a dot, or empty. `family` is
    the name of the family that reads it, `among` are the embeddings to insert among the tokens of a
    language model that is read from it.

    Every reader takes alternative names of a key and reads the first one that is present. `null`
    counts as absent, except for a size that every model has. A reader without a default raises
    `DiagnosticError` if no key is present; all raise it for a value of another type.
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
        self.family = ""
        self.among: object = None

    def _is_ignored(self, key: str) -> bool:
        return key in self._ignored.keys or self._where + key in self._ignored.keys

    @property
    def asked(self) -> frozenset[str]:
        """The keys that were read so far."""
        return frozenset(self._asked)

    # -- presence ----------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """The present keys."""
        return tuple(self._members)

    @property
    def file(self) -> str:
        """The name of the file."""
        return self._text.source.name

    def has(self, *keys: str) -> bool:
        """Whether one of the keys is present with a value other than null."""
        return self._value(keys) is not None

    def is_list(self, key: str) -> bool:
        """Whether a key has a list."""
        return isinstance(self._value([key]), list)

    def is_text(self, key: str) -> bool:
        """Whether a key has a string."""
        return isinstance(self._value([key]), str)

    def length(self, key: str, *, default: int) -> int:
        """The length of the list of a key."""
        value = self._value([key])
        return len(value) if isinstance(value, list) else default

    def names(self, *keys: str) -> bool:
        """Whether one of the keys is present, possibly with null."""
        self._asked.update(keys)
        return any(key in self._members for key in keys)

    def _first(self, keys: Iterable[str]) -> tuple[str, Json]:
        """The first present key and its value, or "" and None. All of the keys count as read."""
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
        """An integer of at least `least`."""
        return self._integer(keys, default, least, most)

    def side(self, key: str, *, default: int) -> int:
        """A positive integer, or a list of two equal ones: height and width."""
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
        for other in keys:
            stated = self._members[other].value if other in self._members else None
            if not (stated is None or _same(stated, value)):
                raise self.refuse(other, f"is {_shown(stated)}, but '{key}' is {value}")
        return value

    def expect_value(self, key: str) -> None:
        """Refuse null for a size that the class requires."""
        if key in self._members and self._members[key].value is None:
            remedy = f"give '{key}' a value, or leave the key out for the default of its class"
            raise self.wrong(key, "an integer", remedy)

    def every(self, *keys: str, default: int) -> int:
        """A period: an integer, or a word such as LLLG, in which only the last letter differs."""
        key, word = self._first(keys)
        if isinstance(word, str):
            if not 1 < len(word) <= MAX_LAYERS or word != word[0] * (len(word) - 1) + word[-1]:
                raise self.wrong(key, "an integer, or a word such as 'LLLG'")
            return len(word)
        return self.size(*keys, default=default)

    def ratio(self, *keys: str, default: int | Fraction | None = None) -> Fraction:
        """A finite exact number of a magnitude up to `MAX_NUMBER`."""
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
        """A number above 0 that a text can have."""
        number = self.ratio(key, default=default)
        if number <= 0:
            raise self.wrong(key, "a positive number")
        if number.denominator > MAX_INTEGER:
            raise self.wrong(key, "a positive number of at most 18 decimals")
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
        """A list of integers, of this length if given; () if no key is present."""
        values = self._list(keys, length)
        integers = tuple(v for v in values if _is_integer(v, least, most))
        if len(integers) < len(values):
            raise self.wrong(keys[0], f"a list of integers from {least} to {most:,}")
        return integers

    def ratios(self, *keys: str, length: int | None = None) -> tuple[Fraction, ...]:
        """A list of finite exact numbers; () if no key is present."""
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
        """A list of words, of this length if given; () if no key is present."""
        values = self._list(keys, length)
        words = tuple(v for v in values if isinstance(v, str) and v in among)
        if len(words) < len(values):
            raise self.wrong(keys[0], f"a list of {', '.join(map(repr, among))}")
        return words

    def kinds(
        self, *keys: str, names: Mapping[str, str], length: int | None = None
    ) -> tuple[str, ...]:
        """The kinds of a list of words; several words may have the same kind."""
        return tuple(names[word] for word in self.words(*keys, among=names, length=length))

    def lists(self, *keys: str) -> int:
        """The length of a list of lists; 0 if no key is present."""
        values = self._list(keys, None)
        if not all(isinstance(value, list) for value in values):
            raise self.wrong(keys[0], "a list of lists")
        return len(values)

    def strings(self, *keys: str) -> tuple[str, ...]:
        """A list of strings; () if no key is present."""
        values = self._list(keys, None)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(keys[0], "a list of strings")
        return tuple(value for value in values if isinstance(value, str))

    def labels(self) -> int:
        """The number of classes, by `id2label` or `num_labels`; 2 without either, the default of
        configuration classes."""
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
        """The configuration in a key, which its reader must finish; None if no key is present."""
        key, value = self._first(keys)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        at = self._members[key].value_at
        inner = Config(self._text, value, f"{self._where}{key}.", at, self._ignored)
        inner.skip(*OF_SECTIONS.get(key, ()))
        return inner

    def needed(self, *keys: str) -> Config:
        """The configuration in a key without which there is no model."""
        return self.section(*keys) or self._default(keys, None)

    def sections(self, key: str, *, length: int) -> list[Config]:
        """The configurations in a list of objects, which the reader must finish."""
        values = self._list([key], length)
        made = [
            Config(self._text, v, f"{self._where}{key}[{n}].", self._members[key].value_at)
            for n, v in enumerate(values)
            if isinstance(v, dict)
        ]
        if len(made) < len(values):
            raise self.wrong(key, "a list of objects")
        return made

    def merge(self, *keys: str) -> None:
        """Add the members of the objects in these keys to this one, unless it has the same key.
        Raises `DiagnosticError` if that has another size."""
        for key in keys:
            inner = self.section(key)
            if inner is not None:
                for name in inner.members:
                    self._expect_same(inner, name)
                self._members = inner._members | self._members

    def _expect_same(self, inner: Config, key: str) -> None:
        """Refuse an integer that an object within this one states otherwise."""
        mine = self._members[key].value if key in self._members else None
        sizes = [v for v in (mine, inner._members[key].value) if _is_integer(v, -1, MAX_NUMBER)]
        if len(set(sizes)) > 1 and not has_no_effect(key):
            message = f"is {_shown(sizes[1])}, but '{self._where}{key}' is {_shown(sizes[0])}"
            raise error(
                f"'{inner._where}{key}' {message}",
                inner.place(key),
                remedy="delete the wrong one of the two from the file",
            )

    def drop(self, key: str) -> bool:
        """Treat a key as absent, and return whether it was present with a value other than null."""
        was_present = self.has(key)
        self._members.pop(key, None)
        return was_present

    def shorten(self, length: int, *keys: str) -> None:
        """Keep the first `length` elements of the lists of these keys."""
        for key in keys:
            if self.length(key, default=0) > length:
                member, value = self._members[key], self._value([key])
                assert isinstance(value, list)
                self._members[key] = Member(value[:length], member.key_at, member.value_at)

    def inherit(self, other: Config, *keys: str) -> None:
        """Replace members of this configuration by those of another one that has them."""
        for key in keys:
            if other.has(key):
                self._members[key] = other._members[key]

    def only(self, key: str, *values: Json, why: str = "is not modeled") -> None:
        """Refuse values other than these of a key that is present and not null."""
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
        """Refuse other values of each of these keys, as `only` does."""
        for key, value in values.items():
            self.only(key, value)

    def restates(self, value: bool, *keys: str) -> None:
        """Accept these boolean keys only with the value that the family always has."""
        for key in self._members.keys() - self._asked:
            if key in keys:
                self.only(key, value, why="its family does not do")

    def skip(self, *keys: str) -> None:
        """Ignore keys of this family that do not change the computation."""
        self._asked.update(keys)

    # -- errors ------------------------------------------------------------------------------------

    def place(self, key: str) -> FileLoc:
        """The place of a key; the beginning of the object if it is absent."""
        member = self._members.get(key)
        if member is None:
            return self._text.place(self._at)
        return self._text.place(member.key_at, len(key) + 2)

    def wrong(self, key: str, expected: str, remedy: str | None = None) -> DiagnosticError:
        """The error of a key whose value has another type."""
        member = self._members.get(key)
        value = _shown(member.value) if member else "nothing"
        return error(
            f"'{self._where}{key}' is {value}, expected {expected}",
            self.place(key),
            remedy=remedy
            or "correct the value; see the config.json that the model was published with",
        )

    def refuse(self, key: str, message: str) -> DiagnosticError:
        """The error of a key whose value conflicts with others."""
        remedy = self._ignore(key) if key in self._members else _add(key)
        return error(f"'{self._where}{key}' {message}", self.place(key), remedy=remedy)

    def divides(self, key: str, number: int, whole: int, what: str = "") -> None:
        """Refuse the number of a key if it does not divide `whole`, which is described by `what`.
        Raises `DiagnosticError`."""
        if whole % number:
            raise self.refuse(key, f"is {number}, which does not divide {whole} {what}".rstrip())

    def _default(self, keys: Sequence[str], default: T | None) -> T:
        if default is not None:
            return default
        suggestion = did_you_mean(keys[0], self._members)
        raise error(
            f"the key '{self._where}{keys[0]}' is missing",
            self._text.place(self._at),
            remedy=suggestion or _add(keys[0]),
        )

    def finish(self) -> None:
        """Refuse the keys that were not read and that may change the computation, or remark on them
        if unknown keys are ignored."""
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


def _add(key: str) -> str:
    """The remedy of an absent key."""
    return f'add it: "{key}": VALUE'


def _is_off(key: str, value: Json) -> bool:
    """Whether the value of a key means the usual computation."""
    return value is None or any(_same(value, off) for off in OFF.get(key, ()))


def _is_integer(value: Json, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Json) -> Fraction | None:
    """A value as a number; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        return None
    return Fraction(value)


def _same(left: object, right: object) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
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
