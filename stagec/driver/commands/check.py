"""`stagec check`: whether traces are well-formed and free of deadlock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.answers.check import check, gap_counts
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.session import log
from stagec.driver.shell.show import show
from stagec.jobs.request.option import switch
from stagec.jobs.request.result import FORM, JSON, form_of

if TYPE_CHECKING:
    from stagec.check.traces import CheckReport


@click.command("check")
@click.argument("directory", metavar="DIR|ARCHIVE|TRACE", type=Path)
@takes(JSON, FORM, switch("strict", "Warnings fail too."))
def command(directory: Path, strict: bool, **given: Any) -> int:
    """Check all traces of a job together: files, nodes, groups, collectives, messages, absence of
    deadlock. The trace of one rank is checked as far as possible without the others.

    Reads traces of other tools too, and archives. Exit code 1 if anything is wrong. If a recorded
    trace lacks what a simulator needs, the answer says so, but this is not an error.
    """
    form = form_of(given)
    answer = check(directory, strict=strict)
    if form != "json":
        _print_findings(answer.report, failed=not answer.ok)
    show(answer, {**given, "output": None})
    return int(not answer.ok)


def _print_findings(report: CheckReport, *, failed: bool) -> None:
    """Print all findings, and the checks that were left out, to stderr."""
    for severity, findings in (("error", report.errors), ("warning", report.warnings)):
        for finding in findings:
            log(f"{severity}: {finding}")
    _print_gaps(report)
    if report.eager_only is not None and not failed:
        log(f"note: {report.eager_only}")
    gaps = {finding.code for finding in report.gaps}
    for code, count in report.omitted.items():
        if code not in gaps:
            log(f"... and {count} more of '{code}'")
    if report.alone and not failed:
        log("note: not checked without the other ranks:")
        for text in report.alone:
            log(f"  {text}")


def _print_gaps(report: CheckReport) -> None:
    """Print the gaps of a recorded trace: the number of each kind, and its first one."""
    for code, count in gap_counts(report).items():
        first = next(finding for finding in report.gaps if finding.code == code)
        log(f"missing for a simulator: {count:,} x {code}, first {first}")
