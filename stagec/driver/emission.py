"""The options that say how traces are written, shared by the commands that write them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from stagec.trace.writer import Emission, Progress

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--force", is_flag=True, help="Replace earlier output in that folder."),
    click.option(
        "--resume",
        is_flag=True,
        help="Complete what an interrupted run left, after comparing what is there.",
    ),
    click.option(
        "--only-ranks",
        metavar="0-1023,4096",
        help="Write the traces of these ranks (default: of all).",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Worker processes (default: one for each processor).",
    ),
    click.option("--quiet", is_flag=True, help="Print no summary and no progress."),
)


def emission_options(function: F) -> F:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@contextmanager
def emission(given: Mapping[str, Any]) -> Generator[Emission]:
    """How to write, as asked for; on a terminal with progress, rate and time left."""
    from stagec.trace.writer import Emission, parse_ranges

    text = given["only_ranks"]
    ranks = parse_ranges(text) if text is not None else None
    workers = given["jobs"] or len(os.sched_getaffinity(0))
    how = ranks, workers, bool(given["resume"]), bool(given["force"])
    if given["quiet"] or not sys.stderr.isatty():
        yield Emission(*how)
        return
    with _progress() as progress:
        yield Emission(*how, progress)


@contextmanager
def _progress() -> Generator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("writing ranks"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    # without a thread that refreshes: workers are forked meanwhile
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task("ranks", total=None, rate="")
        began = time.monotonic()

        def tell(done: int, total: int) -> None:
            rate = f"{done / max(1e-9, time.monotonic() - began):,.0f} ranks/s"
            bar.update(task, completed=done, total=total, rate=rate, refresh=True)

        yield tell
