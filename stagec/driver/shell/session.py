"""The session of a command: messages go to stderr, and progress too if it is a terminal."""

import io
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

import click

from stagec.jobs.session import Progress as Counted
from stagec.jobs.session import Session


class _Stderr(io.TextIOBase):
    """stderr, whose errors are ignored, since nobody reads it then."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            click.echo(text, err=True, nl=False)
        return len(text)

    def isatty(self) -> bool:
        return sys.stderr.isatty()


class ShellSession(Session):
    """The session of a command."""

    def __init__(self) -> None:
        super().__init__(cast(TextIO, _Stderr()))

    @contextmanager
    def progress(self, title: str, things: str) -> Generator[Counted]:
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        with _bar(title, things) as progress:
            yield progress

    @contextmanager
    def live(self) -> Generator[Callable[[str], None]]:
        if not sys.stderr.isatty():
            yield lambda line: None
            return

        def show(line: str) -> None:
            sys.stderr.write(f"\r\x1b[K{line[:110]}")
            sys.stderr.flush()

        try:
            yield show
        finally:
            show("")


def the_session() -> Session:
    """The session of the running command; a new one if there is none."""
    context = click.get_current_context(silent=True)
    return (context and context.find_object(Session)) or ShellSession()


@contextmanager
def progress(title: str, things: str, *, quiet: bool) -> Generator[Counted]:
    """A function that shows the progress of long work, unless `quiet`."""
    with (Session() if quiet else the_session()).progress(title, things) as counted:
        yield counted


def log(line: str) -> None:
    """Print a line to stderr."""
    the_session().log(line)


@contextmanager
def _bar(title: str, things: str) -> Generator[Counted]:
    """A function that shows progress, rate and remaining time on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    # without a refresh thread, since workers may be forked
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task(things, total=None, rate="")
        began = time.monotonic()

        def show(done: int, total: int) -> None:
            rate = f"{done / max(1e-9, time.monotonic() - began):,.0f} {things}/s"
            bar.update(task, completed=done, total=total, rate=rate, refresh=True)

        yield show
