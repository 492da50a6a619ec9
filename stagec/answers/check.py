"""`stagec check`: whether traces are well-formed and free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stagec.output.report import Report
from stagec.support.diagnostics import error
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.check.findings import Finding
    from stagec.check.traces import CheckReport


@dataclass(frozen=True)
class CheckAnswer(Report):
    """The findings in the traces of a job. With `strict`, warnings fail too."""

    path: Path
    report: CheckReport
    strict: bool = False

    column_names = ("kind", "file", "node", "code", "message", "remedy")

    @property
    def ok(self) -> bool:
        """Whether the traces pass."""
        return self.report.ok() and not (self.strict and self.report.warnings)

    @property
    def title(self) -> str:
        return str(self.path)

    @property
    def errors(self) -> list[str]:
        """The violations that make traces invalid."""
        return [str(finding) for finding in self.report.errors]

    @property
    def warnings(self) -> list[str]:
        """The problems that some consumers have with the traces."""
        return [str(finding) for finding in self.report.warnings]

    def as_json(self) -> dict[str, Any]:
        return _as_json(self.report, not self.ok)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each finding."""
        data, kinds = self.as_json(), ("errors", "gaps", "warnings")
        return [{"kind": kind, **each} for kind in kinds for each in data[kind]]

    def print(self, stream: TextIO) -> None:
        report, failed = self.report, not self.ok
        stream.write(
            f"{self.path}: {_verdict(report, failed)}: {counted(report.ranks, 'rank')}, "
            f"{counted(report.nodes, 'node')}, {counted(report.collectives, 'collective')} over "
            f"{counted(report.groups, 'group')}, {counted(report.sends, 'message')}; "
            f"{counted(len(report.errors), 'error')}, {counted(len(report.warnings), 'warning')}"
            f"{_gaps_text(report)}\n"
        )


def check(path: Path, *, strict: bool = False) -> CheckAnswer:
    """Check all traces of a folder or an archive together, or one trace as far as possible without
    the others. Raises `DiagnosticError` if there is no such file."""
    return CheckAnswer(path, _report(path), strict)


def _verdict(report: CheckReport, failed: bool) -> str:
    if report.verdict == "incomplete":
        return "recorded, cannot be simulated as it is"
    if failed:
        return "not well-formed"
    return "well-formed" if report.alone else f"well-formed, free of deadlock{_sends(report)}"


def gap_counts(report: CheckReport) -> dict[str, int]:
    """The number of gaps of a recorded trace, by kind."""
    counts = Counter(finding.code for finding in report.gaps)
    return {code: count + report.omitted.get(code, 0) for code, count in counts.items()}


def _gaps_text(report: CheckReport) -> str:
    missing = sum(gap_counts(report).values())
    return f", {missing:,} missing for a simulator" if missing else ""


def _sends(report: CheckReport) -> str:
    """The sends with which a job terminates: eager ones do not wait for their receives,
    rendezvous sends do."""
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
    message = f"there is no file or folder '{path}', expected a folder, an archive or a trace"
    raise error(message, remedy="give the folder or the archive of a job, or the trace of a rank")


def _as_json(report: CheckReport, failed: bool) -> dict[str, Any]:
    def rows(findings: Iterable[Finding]) -> list[dict[str, str]]:
        return [
            {
                "file": str(f.path),
                "node": "" if f.node is None else str(f.node),
                "code": f.code,
                "message": f.message,
                "remedy": f.remedy,
            }
            for f in findings
        ]

    named = "verdict", "ranks", "nodes", "collectives", "groups", "sends"
    return {
        "schema": 1,
        "ok": not failed,
        **{name: getattr(report, name) for name in named},
        "not_checked": list(report.alone),
        "rendezvous": not failed and report.eager_only is None,
        "errors": rows(report.errors),
        "gaps": rows(report.gaps),
        "warnings": rows(report.warnings),
        "omitted": dict(report.omitted),
    }
