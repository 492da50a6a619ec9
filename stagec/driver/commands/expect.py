"""`--verify-diagnostics`: comments state the diagnostics of a text and their lines.

`// error: TEXT` is at the end of the offending line; `// error@+1: TEXT` refers to the next line,
and `// error@*: TEXT` to any line. `// warning: TEXT` and `// remark: TEXT` have the same forms.
Every expected diagnostic must occur; unexpected warnings and remarks are allowed.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagec.support.diagnostics import Diagnostic, note
from stagec.support.source import FileLoc, Source, file_loc

_SEVERITY = "error|warning|remark"
_EXPECTED = re.compile(
    rf"// (?P<severity>{_SEVERITY})(?:@(?P<at>[+-]\d+|\*))?: "
    rf"(?P<text>.*?)(?=\s*// (?:{_SEVERITY})|\s*$)"
)


@dataclass(frozen=True)
class _Expected:
    severity: str
    text: str
    line: int | None
    loc: FileLoc

    def matches(self, diagnostic: Diagnostic) -> bool:
        place = file_loc(diagnostic.loc)
        here = self.line is None or (place is not None and place.line == self.line)
        return here and diagnostic.severity == self.severity and self.text in diagnostic.message


class Expectations:
    """The expected diagnostics of a text that have not occurred, and its unexpected errors."""

    def __init__(self, source: Source) -> None:
        self._open = list(_expected(source))
        self._unexpected: list[Diagnostic] = []

    def take(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Match each diagnostic with one expectation."""
        for diagnostic in diagnostics:
            met = next((e for e in self._open if e.matches(diagnostic)), None)
            if met is not None:
                self._open.remove(met)
            elif diagnostic.severity == "error":
                self._unexpected.append(diagnostic)

    def problems(self) -> Iterator[Diagnostic]:
        """Errors that were not expected, and expectations that were not met."""
        for unexpected in self._unexpected:
            notes = (*unexpected.notes, note(f"expect it with '// error: {unexpected.message}'"))
            message = f"unexpected error: {unexpected.message}"
            yield Diagnostic(message, unexpected.loc, "error", unexpected.remedy, notes)
        for missing in self._open:
            yield Diagnostic(
                f"expected {missing.severity} was not reported: {missing.text}", missing.loc
            )


def _expected(source: Source) -> Iterator[_Expected]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for match in _EXPECTED.finditer(line):
            at = match["at"]
            where = None if at == "*" else number + int(at or 0)
            loc = FileLoc(source.name, number, match.start() + 1, len(match[0]))
            yield _Expected(match["severity"], match["text"].strip(), where, loc)
