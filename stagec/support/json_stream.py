"""Incremental reading of a large JSON object: one of its lists element by element, other values at
once.

Memory is bounded by one chunk of the text and one element.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.source import FileLoc

_CHUNK = 1 << 20
#: The longest element of a list, and the longest other value.
_LONGEST = 1 << 25
#: A number this close to the end of the buffer may be incomplete, such as 12.5e+3 before the last
#: 3.
_CUT = 3
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonStream:
    """The members of the JSON object in a stream of bytes.

    Bytes that are not UTF-8 become the replacement character, and control characters in strings are
    accepted: profilers write both in names.
    """

    def __init__(self, stream: BinaryIO, name: str, remedy: str) -> None:
        self._stream = stream
        self._name = name
        self._remedy = remedy
        self._text = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._buffer = ""
        self._at = 0  # the next position in the buffer
        self._last = 0  # the position of the last value in the buffer
        self._ended = False
        self._line, self._column = 1, 1  # of the start of the buffer
        self.has_list = False  # whether the streamed list was found

    def members(self, streamed: str) -> Iterator[tuple[str, Any]]:
        """Names and values of the members of the object; for the list named `streamed`, its name
        with each element.

        Raises `DiagnosticError` with a location if the text is not a JSON object.
        """
        first = self._peek()
        if first != "{":
            raise self.error("expected a JSON object" if first else "the file is empty")
        self._at += 1
        if self._peek() == "}":
            return
        while True:
            name = self._name_of_member()
            if name == streamed and self._peek() == "[":
                self.has_list = True
                yield from ((name, value) for value in self._elements())
            else:
                yield name, self._value()
            if not self._another("}"):
                return

    def values(self) -> Iterator[Any]:
        """The values of a stream of several values, such as JSON lines. Raises `DiagnosticError`
        with a location if the text is not JSON."""
        if not self._peek():
            raise self.error("the file is empty")
        while self._peek():
            yield self._value()

    def error(self, message: str) -> DiagnosticError:
        """A `DiagnosticError` at the value that was read last."""
        return self._error(message, self._last)

    def _name_of_member(self) -> str:
        if self._peek() != '"':
            raise self._error("expected a name in quotes", self._at)
        name = self._value()
        if self._peek() != ":":
            raise self._error(f"expected ':' after {name!r:.40}", self._at)
        self._at += 1
        return str(name)

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            yield self._value()
            if not self._another("]"):
                return

    def _another(self, closing: str) -> bool:
        following = self._peek()
        if following not in (",", closing) or not following:
            what = f"found {following!r}" if following else "the file ends"
            raise self._error(f"expected ',' or '{closing}', {what}", self._at)
        self._at += 1
        return following == ","

    def _peek(self) -> str:
        """The next character that is not white space; '' at the end of the file."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except json.JSONDecodeError as problem:
                if len(self._buffer) - self._at <= _LONGEST and self._fill():
                    continue  # the value may go on
                if self._ended and problem.pos >= len(self._buffer.rstrip()) - 1:
                    raise self._error("the file ends in a value", problem.pos) from None
                raise self._error(f"not JSON: {problem.msg}", problem.pos) from None
            except (RecursionError, ValueError) as problem:
                raise self._error(f"not JSON: {problem}", self._at) from None
            if len(self._buffer) - end < _CUT and self._fill():
                continue  # a number may go on
            self._last, self._at = self._at, end
            return value

    def _fill(self) -> bool:
        """Read the next chunk. Returns whether there was more text."""
        if self._ended:
            return False
        data = self._stream.read(max(_CHUNK, len(self._buffer) - self._at))
        self._ended = not data
        more = self._text.decode(data, final=self._ended)
        if self._ended and not more:
            return False
        read = self._buffer[: self._at]
        lines = read.count("\n")
        self._line += lines
        self._column = len(read) - read.rfind("\n") if lines else self._column + len(read)
        self._buffer, self._at, self._last = self._buffer[self._at :] + more, 0, 0
        return True

    def _error(self, message: str, at: int) -> DiagnosticError:
        read = self._buffer[:at]
        lines = read.count("\n")
        column = len(read) - read.rfind("\n") if lines else self._column + len(read)
        place = FileLoc(self._name, self._line + lines, column)
        return error(message, place, remedy=self._remedy)
