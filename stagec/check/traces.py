"""The trace checker: proves that a directory of traces is well-formed and free of deadlock.

It combines the checks of files, of single programs, of agreement between ranks, and of the limits
of simulators.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from stagec.check.agreement import CheckedJob, check_job, check_rank
from stagec.check.deadlock import check_deadlock
from stagec.check.findings import CheckReport, Finding
from stagec.check.ranks import RankReader, RankTrace
from stagec.check.table import RankTable
from stagec.check.trace_files import (
    GroupsFile,
    check_manifest,
    discover,
    job_of,
    read_groups,
    written_of,
)
from stagec.formats.chakra.limits import exceeded_limits
from stagec.formats.chakra.nodes import TraceError

__all__ = ["CheckReport", "Finding", "check_directory", "check_trace"]


def check_directory(directory: Path) -> CheckReport:
    """Check all traces of one job, with their groups file and, if there is one, the manifest. All
    problems are findings; nothing is raised."""
    report = CheckReport()
    job = read_directory(directory, report, RankReader(), manifest=True)
    if job is not None:
        check_traces(job, report)
    return report


def check_trace(path: Path) -> CheckReport:
    """Check the trace of one rank without those of others: its nodes, their dependencies, and its
    groups, if there is a groups file beside it. The report says what was not checked. All problems
    are findings; nothing is raised.
    """
    report = CheckReport()
    name, rank = job_of(path)
    try:
        trace = RankReader().read(path, _NO_RANK if rank is None else rank)
    except TraceError as error:
        report.error(path, "unreadable", f"{error.where}: {error.message}", "write the trace again")
        return report
    groups = None if rank is None else read_groups(path.parent, name, report)
    job = CheckedJob(path.parent, RankTable.of([trace]), frozenset({trace.rank}), groups)
    _count(job, report)
    report.groups = len(trace.groups)
    _report_programs(job.traces, report)
    check_rank(job, trace, report)
    _check_limits(job, report)
    report.alone = [*_not_checked(trace, rank, groups)]
    return report


def _not_checked(trace: RankTrace, rank: int | None, groups: GroupsFile | None) -> Iterator[str]:
    """What cannot be checked without the traces of other ranks, as sentences."""
    if trace.groups:
        if rank is None:
            yield "whether the rank is in its groups: the name of the file is not NAME.RANK.et"
        elif groups is None:
            yield "whether the rank is in its groups: there is no groups file NAME.json beside it"
        yield "whether the members of its groups issue the same collectives in the same order"
    if trace.peers:
        yield "whether its peers receive what it sends, and send what it receives"
    if trace.groups or trace.peers:
        yield "whether ranks wait for each other in a circle"


#: The rank of a trace whose name has none: it is no other rank's peer, and in no group.
_NO_RANK = -1


def read_directory(
    directory: Path, report: CheckReport, reader: RankReader, *, manifest: bool = False
) -> CheckedJob | None:
    """Read all traces of a folder, and with `manifest`, compare its files with the manifest.
    Returns None if there are no traces; a file that cannot be read is reported."""
    name, files = discover(directory, report)
    if not files:
        return None
    if manifest:
        check_manifest(directory, files, report)
    traces = _read(files, report, reader)
    table = RankTable.of(traces)
    return CheckedJob(directory, table, frozenset(files), read_groups(directory, name, report))


def check_traces(job: CheckedJob, report: CheckReport) -> None:
    """Check the traces of a job that have been read."""
    _count(job, report)
    _report_programs(job.traces, report)
    if ranks := written_of(job.directory, job.ranks):  # what is left follows from the missing ranks
        message = (
            f"expected all {ranks:,} ranks of the job, found {len(job.ranks):,} (--only-ranks)"
        )
        remedy = "check one trace alone, or the whole job in one file ('stagec compile --archive')"
        report.error(job.directory, "missing-rank", message, remedy)
        return
    check_job(job, report)
    check_deadlock(job, report)
    _check_limits(job, report)


def _read(files: Mapping[int, Path], report: CheckReport, reader: RankReader) -> list[RankTrace]:
    traces: list[RankTrace] = []
    for rank, path in files.items():
        try:
            traces.append(reader.read(path, rank))
        except TraceError as error:
            message = f"{error.where}: {error.message}"
            report.error(path, "unreadable", message, "write the trace again")
    return traces


def _count(job: CheckedJob, report: CheckReport) -> None:
    report.ranks = len(job.ranks)
    report.groups = len(job.members)
    for each in job.traces.classes:
        analysis, count = each.analysis, len(each.ranks)
        report.nodes += count * len(analysis.deps)
        report.collectives += count * sum(map(len, analysis.collectives.values()))
        report.sends += count * sum(map(len, analysis.sends.values()))


def _report_programs(traces: RankTable, report: CheckReport) -> None:
    """Report the problems of each program once, for the first rank that runs it."""
    for each in traces.classes:
        path, others = traces[int(each.ranks.min())].path, len(each.ranks) - 1
        also = f" (likewise {others} more ranks with this program)" if others else ""
        for problem in each.analysis.problems:
            finding = Finding(
                path, problem.node, problem.code, problem.message + also, problem.remedy
            )
            report.add(problem.severity, finding)


def _check_limits(job: CheckedJob, report: CheckReport) -> None:
    longest = max((len(each.analysis.deps) for each in job.traces.classes), default=0)
    for sentence in exceeded_limits(job.uses.ids.tolist(), len(job.ranks), longest):
        remedy = "fewer ranks, groups or nodes fit; other consumers may take the job as it is"
        report.warning(job.directory, "consumer-limit", sentence, remedy)
