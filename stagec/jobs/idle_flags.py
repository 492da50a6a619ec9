"""Warnings about flags that are of no use to one step: those of a scheduler, and `--no-graphs`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from stagec.ir_spec.strategy.scheduler import SchedulerOp
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import Diagnostic

if TYPE_CHECKING:
    from stagec.formats.base import Format
    from stagec.time.costs.software import Software

NO_GRAPHS = "--no-graphs has no effect"


def unscheduled(options: JobOptions) -> Iterator[Diagnostic]:
    """The flags of a scheduler that are given to one step of serving."""
    for flag in SchedulerOp.flags if options.serve is not None else ():
        if not flag.is_default(getattr(options, flag.name)):
            about = f"{flag.option} has no effect on one step: 'stagec serve' schedules requests"
            yield Diagnostic(about, severity="warning")


def without_graphs(software: Iterable[Software]) -> Iterator[Diagnostic]:
    """`--no-graphs` on steps of this software, if hosts launch none of them as a graph."""
    if not any(each.is_graph for each in software):
        yield Diagnostic(f"{NO_GRAPHS}: hosts launch no graph in this step", severity="warning")


def written_without_graphs(
    formats: Sequence[Format], software: Iterable[Software], *, timed: bool = False
) -> Iterator[Diagnostic]:
    """`--no-graphs` on files of these formats, unless one has the time of the step or it is `timed`
    elsewhere, and on steps that are no graphs."""
    from stagec.formats.timeline.ranks import TimelineFormat

    if timed or any(isinstance(each, TimelineFormat) for each in formats):
        yield from without_graphs(software)
        return
    shown = " and ".join(each.name for each in formats)
    yield Diagnostic(f"{NO_GRAPHS} on {shown}, which has no launches", severity="warning")
