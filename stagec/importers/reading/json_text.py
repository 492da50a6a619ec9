"""A JSON parser that records the place of every member, for diagnostics; numbers are exact.

Decimals become fractions; NaN and infinities become `NOT_FINITE`, which no reader accepts as a
number. Duplicate keys, values nested too deeply, and numbers that are too long are errors.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TypeAlias

from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.source import FileLoc, Source

#: The bound of nesting; published configurations have five levels.
MAX_DEPTH = 32
#: The bounds of the digits of a number and of its power of ten, which is that of the least double.
_MAX_DIGITS, _MAX_POWER = 40, 324
_SPACE = re.compile(r"[ \t\r\n]*")
_REMEDY = "give a model's config.json, whole and unchanged"


class NotFinite:
    """NaN or an infinity, which Python writes although JSON does not have them."""

    def __repr__(self) -> str:
        return "NaN or Infinity"


NOT_FINITE = NotFinite()


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object: its value, and the offsets of the key and the value in the text."""

    value: Json
    key_at: int
    value_at: int


Object = dict[str, Member]
Json: TypeAlias = "bool | int | Fraction | str | NotFinite | list[Json] | Object | None"


class JsonText:
    """A text of one JSON object."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._text = source.text
        self._at = 0
        self._scalar = json.JSONDecoder(
            parse_float=_fraction, parse_int=_integer, parse_constant=lambda _: NOT_FINITE
        ).raw_decode

    def place(self, at: int, width: int = 1) -> FileLoc:
        """The place of an offset in the text."""
        before = self._text[:at]
        return FileLoc(
            self.source.name, before.count("\n") + 1, at - before.rfind("\n"), max(1, width)
        )

    def read(self) -> Object:
        """The members of the object. Raises `DiagnosticError` at the place of invalid JSON."""
        first = self._peek()
        if first != "{":
            raise self._error("expected a JSON object", self._next("the file is empty"))
        value = self._object(1)
        if self._peek():
            raise self._error(
                f"expected the end of the file after the object, found {self._peek()!r}"
            )
        return value

    # -- the parts of the text ---------------------------------------------------------------------

    def _value(self, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise self._error(f"values are nested deeper than {MAX_DEPTH}")
        first = self._peek()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._list(depth)
        if not first:
            raise self._error("expected a value, but the file ends")
        return self._plain()

    def _object(self, depth: int) -> Object:
        members: Object = {}
        self._at += 1
        if self._peek() == "}":
            self._at += 1
            return members
        while True:
            if self._peek() != '"':
                raise self._error("expected a key in quotes", self._next())
            key_at = self._at
            key = str(self._plain())
            if self._peek() != ":":
                raise self._error(f"expected ':' after {key!r:.60}", self._next())
            self._at += 1
            self._peek()
            value_at = self._at
            value = self._value(depth + 1)
            if key in members:
                raise error(
                    f"duplicate key {key!r:.60}",
                    self.place(key_at, len(key) + 2),
                    remedy="remove one of the two",
                )
            members[key] = Member(value, key_at, value_at)
            if not self._another("}"):
                return members

    def _list(self, depth: int) -> list[Json]:
        items: list[Json] = []
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return items
        while True:
            items.append(self._value(depth + 1))
            if not self._another("]"):
                return items

    def _plain(self) -> Json:
        """A string, a number or a constant."""
        try:
            value, self._at = self._scalar(self._text, self._at)
        except json.JSONDecodeError as problem:
            ends = problem.pos >= len(self._text.rstrip()) or problem.msg.startswith("Unterminated")
            self._at = problem.pos
            what = "the file ends in a value" if ends else f"is not JSON: {problem.msg}"
            raise self._error(what) from None
        except _LongNumberError:
            raise self._error(f"a number has more than {_MAX_DIGITS} digits") from None
        return value  # type: ignore[no-any-return]

    def _another(self, closing: str) -> bool:
        mark = self._peek()
        if mark not in (",", closing) or not mark:
            raise self._error(f"expected ',' or '{closing}'", self._next())
        self._at += 1
        return mark == ","

    def _peek(self) -> str:
        """The next character that is not a space; '' at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _next(self, end: str = "the file ends") -> str:
        return f"found {self._peek()!r}" if self._peek() else end

    def _error(self, message: str, instead: str = "") -> DiagnosticError:
        text = f"{message}, {instead}" if instead else message
        return error(text, self.place(self._at), remedy=_REMEDY)


class _LongNumberError(Exception):
    """A number beyond the bounds."""


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _LongNumberError
    return int(text)


def _fraction(text: str) -> int | Fraction:
    """The exact value of a decimal, an integer if it is whole."""
    try:
        value = Decimal(text)
    except InvalidOperation:  # its exponent is out of range
        raise _LongNumberError from None
    if len(text) > _MAX_DIGITS or abs(value.adjusted()) > _MAX_POWER:
        raise _LongNumberError
    exact = Fraction(value)
    return exact.numerator if exact.denominator == 1 else exact
