"""The options for writing traces, which several commands share, and the writing."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.jobs.request.option import AnyText, CommandOption, Whole, rare_option, switch
from stagec.jobs.session import Session
from stagec.support.processors import processors

if TYPE_CHECKING:
    from stagec.traces.archive import Archive
    from stagec.traces.cluster import Run
    from stagec.traces.emit import EmittedJob
    from stagec.traces.pod_programs import PodsJob
    from stagec.traces.recorded import RecordedJob
    from stagec.traces.writer import Emission, Written

    Source = EmittedJob | PodsJob | Archive | RecordedJob

#: The options of workers.
WORKERS = (
    CommandOption("jobs", Whole(least=1), "Worker processes (default: one for each processor)."),
    rare_option(
        "scheduler",
        AnyText(),
        "Work on a Dask cluster: at the address of a scheduler, or as N (--jobs) workers in "
        "SLURM jobs.",
        metavar="ADDRESS|FILE.json|slurm",
    ),
)
#: The options for writing traces.
EMISSION = (
    switch("force", "Replace earlier output in that folder."),
    switch(
        "resume", "Complete the output of an interrupted run, after comparing the files that exist."
    ),
    CommandOption(
        "only_ranks", AnyText(), "Write the traces of these ranks only.", metavar="0-1023,4096"
    ),
    *WORKERS,
    switch("quiet", "Print no summary and no progress."),
)


@contextmanager
def workers(given: Mapping[str, Any]) -> Generator[Run]:
    """The function that runs units of work in the workers of the options. Raises `DiagnosticError`
    if the cluster cannot be reached."""
    if given["scheduler"] is not None:
        from stagec.traces.cluster import cluster

        with cluster(given["scheduler"], given["jobs"]) as run:
            yield run
        return
    from stagec.traces.workers import run_units

    yield partial(run_units, workers=_processes(given))


def emit(
    source: Source,
    directory: Path,
    about: Mapping[str, object],
    given: Mapping[str, Any],
    session: Session,
) -> Written:
    """Write the traces of a job as the options say; workers of a cluster write all but recorded
    jobs. Raises `DiagnosticError`."""
    from stagec.traces.writer import write_source

    with ExitStack() as stack:
        how = stack.enter_context(_emission(given, session))
        if given["scheduler"] is not None:
            from stagec.traces.recorded import RecordedJob
            from stagec.traces.remote import written_by

            if not isinstance(source, RecordedJob):
                run = stack.enter_context(workers(given))
                how = replace(how, elsewhere=written_by(run, source))
        return write_source(source, directory, about, how)


@contextmanager
def _emission(given: Mapping[str, Any], session: Session) -> Generator[Emission]:
    """The settings for writing, with progress unless --quiet."""
    from stagec.traces.writer import Emission, parse_ranges

    text = given["only_ranks"]
    ranks = parse_ranges(text) if text is not None else None
    how = ranks, _processes(given), bool(given["resume"]), bool(given["force"])
    if given["quiet"]:
        yield Emission(*how)
        return
    with session.progress("writing ranks", "ranks") as progress:
        yield Emission(*how, progress)


def _processes(given: Mapping[str, Any]) -> int:
    return given["jobs"] or processors()
