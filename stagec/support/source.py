"""Source texts and locations of operations.

Owns `Source` (a named text) and the `Loc` family. A location does not contain the text, so that the
IR stays small; the printer of diagnostics looks lines up in its sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """A text, and its name in diagnostics."""

    name: str
    text: str = field(repr=False)

    def line(self, number: int) -> str | None:
        """The 1-based line, without its line break; None if there is no such line."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else None


@dataclass(frozen=True, slots=True)
class FileLoc:
    """A location in a file, 1-based; `width` columns are underlined in diagnostics."""

    file: str
    line: int
    col: int
    width: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class NameLoc:
    """The creator of an operation (usually a pass), and the location for which it was made."""

    name: str
    inner: Loc


@dataclass(frozen=True, slots=True)
class UnknownLoc:
    """No location is known, as for IR that was built by hand."""


Loc = FileLoc | NameLoc | UnknownLoc
UNKNOWN = UnknownLoc()


def file_loc(loc: Loc) -> FileLoc | None:
    """The location in a file behind any chain of names, or None."""
    while isinstance(loc, NameLoc):
        loc = loc.inner
    return loc if isinstance(loc, FileLoc) else None


def made_by(name: str, loc: Loc) -> NameLoc:
    """The location of an operation that `name` inserts for something at `loc`."""
    place = file_loc(loc)
    return NameLoc(name, place if place is not None else UNKNOWN)
