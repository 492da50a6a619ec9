"""Diagnostics: errors, warnings and remarks with a location, a caret, notes and a remedy.

A failing step collects as many as it can and raises one `DiagnosticError`; only the driver prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from stagec.support.source import UNKNOWN, Loc, Source, file_loc

Severity = Literal["error", "warning", "remark", "note"]
_MAX_LINE = 240
_MAX_MESSAGE = 800
_MAX_ERRORS = 100


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `remedy` states what the author can do; `notes` point at related locations."""

    message: str
    loc: Loc = UNKNOWN
    severity: Severity = "error"
    remedy: str | None = None
    notes: tuple[Diagnostic, ...] = ()


def note(message: str, loc: Loc = UNKNOWN) -> Diagnostic:
    """A note, to be attached to another diagnostic."""
    return Diagnostic(message, loc, "note")


_TOO_MANY = Diagnostic(
    f"more than {_MAX_ERRORS} errors; the others are not shown", remedy="correct these first"
)


class DiagnosticError(Exception):
    """The input is invalid; at least one of `diagnostics` is an error. Its notes, which a traceback
    shows, have the remedies."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        self.diagnostics = diagnostics
        self.__notes__ = [render(each, {}) for each in diagnostics]
        super().__init__("; ".join(d.message for d in diagnostics))

    def __reduce__(self) -> tuple[type[DiagnosticError], tuple[Diagnostic, ...]]:
        return DiagnosticError, self.diagnostics  # errors cross processes


def error(
    message: str, loc: Loc = UNKNOWN, *, remedy: str | None = None, notes: Iterable[Diagnostic] = ()
) -> DiagnosticError:
    """A `DiagnosticError` of one error, ready to be raised."""
    return DiagnosticError(Diagnostic(message, loc, "error", remedy, tuple(notes)))


class Located:
    """Base class of what a text states somewhere, at its `loc`."""

    __slots__ = ()
    loc: Loc

    def error(
        self, message: str, *, remedy: str | None = None, notes: Iterable[Diagnostic] = ()
    ) -> DiagnosticError:
        """A `DiagnosticError` of one error at this place, ready to be raised."""
        return error(message, self.loc, remedy=remedy, notes=notes)


class DiagnosticList:
    """Collects diagnostics; `check` raises if there is an error among them.

    After a hundred errors, the next one makes `add` raise `DiagnosticError` with all of them.
    """

    def __init__(self) -> None:
        self.items: list[Diagnostic] = []
        self._seen: set[Diagnostic] = set()
        self._full = False

    def add(self, *items: Diagnostic) -> None:
        """Append diagnostics; equal ones once. Raises `DiagnosticError` for too many errors."""
        for item in items:
            if item in self._seen:
                continue
            if item.severity == "error" and len(self._seen) >= _MAX_ERRORS <= len(self.errors):
                self._full = True
                self.check()
            self._seen.add(item)
            self.items.append(item)

    def error(
        self,
        message: str,
        loc: Loc = UNKNOWN,
        *,
        remedy: str | None = None,
        notes: Iterable[Diagnostic] = (),
    ) -> None:
        """Append an error."""
        self.add(Diagnostic(message, loc, "error", remedy, tuple(notes)))

    def remark(self, message: str, loc: Loc = UNKNOWN) -> None:
        """Append a remark: something the author may want to know."""
        self.add(Diagnostic(message, loc, "remark"))

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The errors among the items."""
        return tuple(item for item in self.items if item.severity == "error")

    def check(self) -> None:
        """Raise `DiagnosticError` with all errors, if there are any."""
        if self.errors:
            raise DiagnosticError(*self.errors, *([_TOO_MANY] if self._full else []))


def render(diagnostic: Diagnostic, sources: Mapping[str, Source]) -> str:
    """`file:line:col: error: message`, the line, a caret, the remedy and the notes."""
    place = file_loc(diagnostic.loc)
    head = f"{place.file}:{place.line}:{place.col}: " if place else ""
    lines = [f"{head}{diagnostic.severity}: {_shortened(diagnostic.message)}"]
    if place:
        lines += _excerpt(sources, place.file, place.line, place.col, place.width)
    if diagnostic.remedy:
        lines.append(f"  help: {_shortened(diagnostic.remedy)}")
    lines += [render(item, sources) for item in diagnostic.notes]
    return "\n".join(lines)


def _shortened(text: str) -> str:
    """The text, without its middle if it is very long."""
    if len(text) <= _MAX_MESSAGE:
        return text
    return f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 4 :]}"


def _excerpt(
    sources: Mapping[str, Source], file: str, line: int, col: int, width: int
) -> list[str]:
    source = sources.get(file)
    text = source.line(line) if source else None
    if text is None:
        return []
    start = max(0, col - 1 - _MAX_LINE // 2) if len(text) > _MAX_LINE else 0
    shown = "".join(c if c.isprintable() else " " for c in text[start : start + _MAX_LINE])
    caret = min(max(col - 1 - start, 0), len(shown))
    return ["  " + shown, "  " + " " * caret + "^" * max(1, min(width, len(shown) - caret))]


class NotAnIntegerError(Exception):
    """An expression that must be an integer is not one: a division is not exact, or it is by zero
    (then `value` is None). `fault` states which."""

    def __init__(self, text: str, value: Fraction | None) -> None:
        self.text, self.value = text, value
        self.fault = "divides by zero" if value is None else f"is {value}"
        super().__init__(f"'{text}' {self.fault}{'' if value is None else ', not an integer'}")

    def __reduce__(self) -> tuple[type[NotAnIntegerError], tuple[str, Fraction | None]]:
        return NotAnIntegerError, (self.text, self.value)  # errors cross processes
