"""`stagec check`: proves a folder or an archive of traces well-formed and free of deadlock, and one
trace well-formed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagec.driver.output.common import write_output
from stagec.driver.output.streams import tell
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.check.findings import Finding
    from stagec.check.traces import CheckReport


@click.command("check")
@click.argument("directory", metavar="DIR|ARCHIVE|TRACE", type=Path)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--strict", is_flag=True, help="Warnings fail too.")
def command(directory: Path, as_json: bool, strict: bool) -> int:
    """Check all traces of a job together: files, nodes, groups, collectives, messages, absence of
    deadlock. The trace of one rank is checked as far as it goes without the others.

    Reads traces of other tools too, and archives. Exit code 1 if anything is wrong. A recorded
    trace that lacks what a simulator needs is not broken: it cannot be simulated as it is.
    """
    report = _report(directory)
    failed = not report.ok() or (strict and bool(report.warnings))
    if as_json:
        write_output(json.dumps(_as_json(report, failed), indent=1) + "\n", None)
        return int(failed)
    for severity, findings in (("error", report.errors), ("warning", report.warnings)):
        for finding in findings:
            tell(f"{severity}: {finding}")
    _tell_gaps(report)
    if report.eager_only is not None and not failed:
        tell(f"note: {report.eager_only}")
    gaps = {finding.code for finding in report.gaps}
    for code, count in report.omitted.items():
        if code not in gaps:
            tell(f"... and {count} more of '{code}'")
    if report.alone and not failed:
        tell("note: not checked without the other ranks:")
        for text in report.alone:
            tell(f"  {text}")
    sys.stdout.write(
        f"{directory}: {_verdict(report, failed)}: {counted(report.ranks, 'rank')}, "
        f"{counted(report.nodes, 'node')}, {counted(report.collectives, 'collective')} over "
        f"{counted(report.groups, 'group')}, {counted(report.sends, 'message')}; "
        f"{counted(len(report.errors), 'error')}, {counted(len(report.warnings), 'warning')}"
        f"{_gaps_text(report)}\n"
    )
    return int(failed)


def _verdict(report: CheckReport, failed: bool) -> str:
    if report.verdict == "incomplete":
        return "recorded, cannot be simulated as it is"
    if failed:
        return "not well-formed"
    return "well-formed" if report.alone else f"well-formed, free of deadlock{_sends(report)}"


def _tell_gaps(report: CheckReport) -> None:
    """What a recorded trace lacks: how many of each kind, and the first of them."""
    for code, count in _gap_counts(report).items():
        first = next(finding for finding in report.gaps if finding.code == code)
        tell(f"missing for a simulator: {count:,} x {code}, first {first}")


def _gap_counts(report: CheckReport) -> dict[str, int]:
    counts = Counter(finding.code for finding in report.gaps)
    return {code: count + report.omitted.get(code, 0) for code, count in counts.items()}


def _gaps_text(report: CheckReport) -> str:
    missing = sum(_gap_counts(report).values())
    return f", {missing:,} missing for a simulator" if missing else ""


def _sends(report: CheckReport) -> str:
    """With which sends a job ends: eager ones do not wait, others wait for their receives."""
    if not report.sends:
        return ""
    return (
        " with eager and rendezvous sends"
        if report.eager_only is None
        else " with eager sends only"
    )


def _report(path: Path) -> CheckReport:
    if path.is_dir():
        from stagec.check.traces import check_directory

        return check_directory(path)
    if path.is_file():
        from stagec.traces.archive import is_archive

        if is_archive(path):
            from stagec.check.archive import check_archive

            return check_archive(path)
        from stagec.check.traces import check_trace

        return check_trace(path)
    from stagec.support.diagnostics import error

    found = f"there is no file or folder '{path}', expected a folder, an archive or a trace"
    raise error(found, remedy="give the folder or the archive of a job, or the trace of a rank")


def _as_json(report: CheckReport, failed: bool) -> dict[str, object]:
    def rows(findings: Iterable[Finding]) -> list[dict[str, str]]:
        return [
            {
                "file": str(f.path),
                "node": str(f.node),
                "code": f.code,
                "message": f.message,
                "remedy": f.remedy,
            }
            for f in findings
        ]

    return {
        "schema": 1,
        "ok": not failed,
        "verdict": report.verdict,
        "ranks": report.ranks,
        "nodes": report.nodes,
        "collectives": report.collectives,
        "groups": report.groups,
        "sends": report.sends,
        "not_checked": list(report.alone),
        "rendezvous": not failed and report.eager_only is None,
        "errors": rows(report.errors),
        "gaps": rows(report.gaps),
        "warnings": rows(report.warnings),
        "omitted": dict(report.omitted),
    }
