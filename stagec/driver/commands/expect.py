"""`--verify-diagnostics`: comments say which errors a text must give, and where.

`// error: TEXT` stands at the end of the offending line; `// error@+1: TEXT` speaks of the next
line, `// error@*: TEXT` of no line in particular.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagec.support.diagnostics import Diagnostic, note
from stagec.support.source import FileLoc, Source, file_loc

_EXPECTED = re.compile(r"// error(?:@(?P<at>[+-]\d+|\*))?: (?P<text>.*?)(?=\s*// error|\s*$)")


@dataclass(frozen=True)
class _Expected:
    text: str
    line: int | None
    loc: FileLoc

    def matches(self, diagnostic: Diagnostic) -> bool:
        place = file_loc(diagnostic.loc)
        here = self.line is None or (place is not None and place.line == self.line)
        return here and self.text in diagnostic.message


class Expectations:
    """The expected errors of one text, and what came instead."""

    def __init__(self, source: Source) -> None:
        self._open = list(_expected(source))
        self._extra: list[Diagnostic] = []

    def take(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Match each error with one expectation."""
        for diagnostic in diagnostics:
            if diagnostic.severity != "error":
                continue
            found = next((e for e in self._open if e.matches(diagnostic)), None)
            if found is None:
                self._extra.append(diagnostic)
            else:
                self._open.remove(found)

    def problems(self) -> Iterator[Diagnostic]:
        """Errors that were not expected, and expectations that were not met."""
        for extra in self._extra:
            notes = (*extra.notes, note(f"expect it with '// error: {extra.message}'"))
            message = f"unexpected error: {extra.message}"
            yield Diagnostic(message, extra.loc, "error", extra.remedy, notes)
        for missing in self._open:
            yield Diagnostic(f"expected error was not reported: {missing.text}", missing.loc)


def _expected(source: Source) -> Iterator[_Expected]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for match in _EXPECTED.finditer(line):
            at = match["at"]
            where = None if at == "*" else number + int(at or 0)
            loc = FileLoc(source.name, number, match.start() + 1, len(match[0]))
            yield _Expected(match["text"].strip(), where, loc)
