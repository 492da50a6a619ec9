"""What all commands share: how errors are told, how texts are read and written."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import click

from stagec.driver.output.streams import tell
from stagec.models import LIBRARY, library_text
from stagec.support.diagnostics import (
    Diagnostic,
    DiagnosticError,
    NotAnIntegerError,
    error,
    note,
    render,
)
from stagec.support.files import write_file
from stagec.support.limits import MAX_BYTES
from stagec.support.source import FileLoc, Loc, Source, file_loc
from stagec.support.texts import decoded, read_text

OK, WRONG_INPUT, WRONG_USAGE, BUG, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 70, 130, 141
STDIN = "<stdin>"
DEBUG = "STAGEC_DEBUG"

#: The texts that the command at hand has read.
_sources: ContextVar[dict[str, Source]] = ContextVar("_sources")
_kept: ContextVar[list[Diagnostic] | None] = ContextVar("_kept", default=None)


def remember(source: Source) -> Source:
    """Keep a text so that diagnostics can show its lines."""
    sources = _sources.get(None)
    if sources is not None:
        sources[source.name] = source
    return source


def report(diagnostic: Diagnostic) -> None:
    """Show a diagnostic with the line that it is about, on stderr."""
    kept = _kept.get()
    if kept is not None:
        kept.append(diagnostic)
        return
    for item in (diagnostic, *diagnostic.notes):
        _remember_file(item.loc)
    tell(render(diagnostic, _sources.get({})))


def _remember_file(loc: Loc) -> None:
    """Let a diagnostic show the lines of a plug-in, or of an imported text."""
    place = file_loc(loc)
    if place is None or place.file in _sources.get({}):
        return
    with suppress(OSError, ValueError):
        if place.file.startswith(LIBRARY):
            remember(Source(place.file, library_text(place.file.removeprefix(LIBRARY))))
        elif place.file.endswith((".py", ".stg")):
            remember(Source(place.file, Path(place.file).read_text(encoding="utf-8")))


@contextmanager
def kept_reports() -> Generator[list[Diagnostic]]:
    """Keep what is reported meanwhile, instead of showing it."""
    kept: list[Diagnostic] = []
    before = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(before)


@contextmanager
def reports_once() -> Generator[None]:
    """Show each thing that is reported meanwhile once, at the end."""
    kept: list[Diagnostic] = []
    try:
        with kept_reports() as kept:
            yield
    finally:
        for diagnostic in dict.fromkeys(kept):
            report(diagnostic)


@contextmanager
def sources() -> Generator[dict[str, Source]]:
    """Keep the texts that are read meanwhile, so that diagnostics can show their lines."""
    texts: dict[str, Source] = {}
    before = _sources.set(texts)
    try:
        yield texts
    finally:
        _sources.reset(before)


def run_safely(run: Callable[[], object]) -> int:
    """Run a command; the exit code. All that can go wrong is told on stderr, without a traceback.

    A command returns its exit code, or None for 0.
    """
    with sources():
        return _exit_code(run)


def _exit_code(run: Callable[[], object]) -> int:
    try:
        result = run()
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except DiagnosticError as e:
        for diagnostic in e.diagnostics:
            report(diagnostic)
        return WRONG_INPUT
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        with suppress(OSError):
            e.show()
        return WRONG_USAGE if isinstance(e, click.UsageError) else WRONG_INPUT
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED_PIPE
    except OSError as e:
        return _os_error(e)
    except NotAnIntegerError as e:
        report(_not_whole(e))
        return WRONG_INPUT
    except Exception as e:
        return _mistake(e)


def _not_whole(problem: NotAnIntegerError) -> Diagnostic:
    return Diagnostic(
        f"{problem.text} is {problem.value}, expected a whole number",
        remedy="choose sizes that divide: the batch, the sequence, --microbatches, "
        "--capacity-factor",
    )


_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "give a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EACCES: "check the permissions of the file and its folder",
    errno.EPERM: "check the permissions of the file and its folder",
    errno.EROFS: "write to another place",
    errno.ENOSPC: "free space on the disk, or write to another place",
    errno.EDQUOT: "free space on the disk, or write to another place",
    errno.EEXIST: "choose another name, or remove what is there",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def _os_error(problem: OSError) -> int:
    if problem.errno == errno.EPIPE:
        return CLOSED_PIPE
    reason = problem.strerror or str(problem)
    where = f"{problem.filename}: " if problem.filename else "cannot write the output: "
    remedy = _REMEDIES.get(problem.errno or 0, "check the path and the system")
    notes = tuple(map(note, getattr(problem, "__notes__", ())))
    report(Diagnostic(where + reason, remedy=remedy, notes=notes))
    return WRONG_INPUT


def _mistake(problem: Exception) -> int:
    """Tell of a mistake in a plug-in, or in the compiler."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        tell(traceback.format_exc())
    from stagec.pipeline.blame import blamed

    found = blamed(problem)
    if found is None:
        return _bug(problem)
    report(found)
    return WRONG_INPUT


def _bug(problem: Exception) -> int:
    tell(f"stagec: internal error: {type(problem).__name__}: {problem}")
    tell(f"This is a bug in stagec. {DEBUG}=1 shows the traceback.")
    hint = "'stagec opt --reproducer FILE' writes what is needed to run it again"
    for line in getattr(problem, "__notes__", (hint,)):
        tell(f"  {line}")
    return BUG


# -- reading and writing ---------------------------------------------------------------------------


def read_source(path: str, most: int = MAX_BYTES) -> Source:
    """The text of a file, or of stdin for '-'; diagnostics can show its lines.

    Raises `DiagnosticError` for what is no text, or longer than `most` bytes.
    """
    if path == "-":
        return remember(decoded(STDIN, sys.stdin.buffer.read(most + 1), most))
    return remember(read_text(path, most))


def read_part(path: str, what: str, remedy: str) -> Source:
    """The text of a file with an op `what`, which may stand without a module around it. Raises
    `DiagnosticError`, with the remedy where there is nothing in it."""
    source = read_source(path)
    if not source.text.strip():
        raise error(
            f"the text is empty, expected a '{what}'", FileLoc(source.name, 1, 1), remedy=remedy
        )
    return source


def write_output(text: str, path: Path | str | None) -> None:
    """Write a result to a file, or to stdout for None or '-'."""
    if path is None or str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()  # before what follows on stderr
    else:
        write_file(Path(path), text)
