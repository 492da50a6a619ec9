"""What goes with a question beside its options: the texts that were read for it, and where it says
what there is to know."""

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

#: Gets how many are done, of how many.
Progress: TypeAlias = Callable[[int, int], None]
STDIN = "<stdin>"
#: Files whose lines diagnostics show although nobody read them as a text.
_READABLE = (".py", ".stg", ".toml")


class Session:
    """Made by the caller, and handed down. Diagnostics and lines for people go to `stream`;
    without one diagnostics are kept in `diagnostics`, and lines are dropped. A terminal shows
    progress as well."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.sources: dict[str, Source] = {}
        self.diagnostics: list[Diagnostic] = []
        self.stream = stream
        self._keeps = stream is None

    @contextmanager
    def progress(self, title: str, things: str) -> Generator[Progress]:
        """What shows how far long work is; `things` are counted."""
        yield lambda done, total: None

    @contextmanager
    def live(self) -> Generator[Callable[[str], None]]:
        """What shows a line that says what goes on, in place of the one before it."""
        yield lambda line: None

    def report(self, *diagnostics: Diagnostic) -> None:
        """Say what there is to know."""
        if self._keeps:
            self.diagnostics += diagnostics
            return
        for diagnostic in diagnostics:
            self.log(self.rendered(diagnostic))

    def remark(self, *texts: str) -> None:
        """Say what is worth knowing."""
        self.report(*(Diagnostic(text, severity="remark") for text in texts))

    def log(self, line: str) -> None:
        """A line for people."""
        if self.stream is not None:
            self.stream.write(f"{line}\n")
            self.stream.flush()

    def aside(self) -> Session:
        """A session of the same texts and stream, which keeps diagnostics."""
        session = Session(self.stream)
        session.sources, session._keeps = self.sources, True
        return session

    @contextmanager
    def once(self, aside: Session | None = None) -> Generator[Session]:
        """A session of the same texts, by default a new one, of which each thing that it keeps is
        said once, at the end."""
        session = aside or self.aside()
        try:
            yield session
        finally:
            self.report(*dict.fromkeys(session.diagnostics))
            session.diagnostics.clear()

    # -- texts -------------------------------------------------------------------------------------

    def remember(self, source: Source) -> Source:
        """Keep a text so that diagnostics can show its lines."""
        self.sources[source.name] = source
        return source

    def read(self, path: str, most: int = MAX_BYTES) -> Source:
        """The text of a file, or of stdin for '-'. Raises `DiagnosticError` for what is no text, or
        longer than `most` bytes; `OSError`."""
        if path == "-":
            return self.remember(decoded(STDIN, sys.stdin.buffer.read(most + 1), most))
        return self.remember(read_text(path, most))

    def read_part(self, path: str, what: str, remedy: str) -> Source:
        """The text of a file with an op `what`, which may stand without a module around it. Raises
        `DiagnosticError`, with the remedy where there is nothing in it; `OSError`."""
        source = self.read(path)
        if not source.text.strip():
            raise error(
                f"the text is empty, expected a '{what}'", FileLoc(source.name, 1, 1), remedy=remedy
            )
        return source

    def rendered(self, diagnostic: Diagnostic) -> str:
        """A diagnostic with the lines that it is about."""
        for item in (diagnostic, *diagnostic.notes):
            place = file_loc(item.loc)
            if place is not None and place.file not in self.sources:
                self._find(place.file)
        return render(diagnostic, self.sources)

    def _find(self, file: str) -> None:
        """The text of a plug-in, or of an imported text."""
        with suppress(OSError, ValueError):
            if file.startswith(LIBRARY):
                self.remember(Source(file, library_text(file.removeprefix(LIBRARY))))
            elif file.endswith(_READABLE):
                self.remember(Source(file, Path(file).read_text(encoding="utf-8")))
