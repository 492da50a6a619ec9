"""The session of a question: the texts that were read, and where diagnostics and messages go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, TypeAlias

from stagec.models import LIBRARY, library_text
from stagec.support.diagnostics import Diagnostic, error, render
from stagec.support.limits import MAX_BYTES
from stagec.support.source import FileLoc, Source, file_loc
from stagec.support.texts import decoded, read_text

#: Called with the number of things done, and of all things.
Progress: TypeAlias = Callable[[int, int], None]
STDIN = "<stdin>"
#: The endings of files that diagnostics may quote although they were not read as a text.
_READABLE = (".py", ".stg", ".toml")


class Session:
    """A session, which the caller makes and passes on. Diagnostics and messages go to `stream`;
    without one diagnostics are collected in `diagnostics`, and messages are dropped. Subclasses
    also show progress."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.sources: dict[str, Source] = {}
        self.diagnostics: list[Diagnostic] = []
        self.stream = stream
        self._keeps = stream is None

    @contextmanager
    def progress(self, title: str, things: str) -> Generator[Progress]:
        """Show the progress of long work; `things` names what is counted."""
        yield lambda done, total: None

    @contextmanager
    def live(self) -> Generator[Callable[[str], None]]:
        """Show a line about the present work, in place of the line before it."""
        yield lambda line: None

    def report(self, *diagnostics: Diagnostic) -> None:
        """Report diagnostics."""
        if self._keeps:
            self.diagnostics += diagnostics
            return
        for diagnostic in diagnostics:
            self.log(self.rendered(diagnostic))

    def remark(self, *texts: str) -> None:
        """Report remarks."""
        self.report(*(Diagnostic(text, severity="remark") for text in texts))

    def log(self, line: str) -> None:
        """Write a message."""
        if self.stream is not None:
            self.stream.write(f"{line}\n")
            self.stream.flush()

    def aside(self) -> Session:
        """A session with the same texts and stream, which collects diagnostics."""
        session = Session(self.stream)
        session.sources, session._keeps = self.sources, True
        return session

    @contextmanager
    def once(self, aside: Session | None = None) -> Generator[Session]:
        """A session with the same texts, by default a new one, whose distinct diagnostics are
        reported at the end."""
        session = aside or self.aside()
        try:
            yield session
        finally:
            self.report(*dict.fromkeys(session.diagnostics))
            session.diagnostics.clear()

    # -- texts -------------------------------------------------------------------------------------

    def remember(self, source: Source) -> Source:
        """Keep a text so that diagnostics can quote its lines."""
        self.sources[source.name] = source
        return source

    def read(self, path: str, most: int = MAX_BYTES) -> Source:
        """The text of a file, or of stdin for '-'. Raises `DiagnosticError` if it is not a text, or
        longer than `most` bytes; `OSError`."""
        if path == "-":
            return self.remember(decoded(STDIN, sys.stdin.buffer.read(most + 1), most))
        return self.remember(read_text(path, most))

    def read_part(self, path: str, what: str, remedy: str) -> Source:
        """The text of a file with an op `what`, which need not be in a module. Raises
        `DiagnosticError` with the remedy if the text is empty; `OSError`."""
        source = self.read(path)
        if not source.text.strip():
            raise error(
                f"the text is empty, expected a '{what}'", FileLoc(source.name, 1, 1), remedy=remedy
            )
        return source

    def rendered(self, diagnostic: Diagnostic) -> str:
        """The text of a diagnostic, with the lines that it refers to."""
        for item in (diagnostic, *diagnostic.notes):
            place = file_loc(item.loc)
            if place is not None and place.file not in self.sources:
                self._find(place.file)
        return render(diagnostic, self.sources)

    def _find(self, file: str) -> None:
        """Read the text of a plug-in or of the library, if possible."""
        with suppress(OSError, ValueError):
            if file.startswith(LIBRARY):
                self.remember(Source(file, library_text(file.removeprefix(LIBRARY))))
            elif file.endswith(_READABLE):
                self.remember(Source(file, Path(file).read_text(encoding="utf-8")))
