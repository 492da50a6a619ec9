"""What the trace checker reports: findings, and the report that collects them.

A code is reported in full a limited number of times; the rest is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from stagec.check.nodes import Severity
from stagec.support.diagnostics import Diagnostic, DiagnosticError

Verdict: TypeAlias = Literal["well-formed", "incomplete", "broken"]

FINDINGS_PER_CODE = 20
"""How many findings of one code a report spells out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, where, and what to do about it.

    `node` is a node id of the file `path`, or None where the finding is not about one node.
    `message` states what was expected and what was found.
    """

    path: Path
    node: int | None
    code: str
    message: str
    remedy: str

    def __str__(self) -> str:
        named = self.node is None or f"node {self.node} " in self.message
        where = str(self.path) if named else f"{self.path}: node {self.node}"
        return f"{where}: {self.message} [{self.code}]; {self.remedy}"


@dataclass(slots=True)
class CheckReport:
    """The outcome of checking a directory of traces.

    `ranks` counts trace files; `nodes`, `collectives` and `sends` count nodes over all ranks;
    `groups` counts the communicator groups of the groups file. `eager_only` says why a job that is
    free of deadlock is so only if sends do not wait for their receives. `gaps` are what a recorded
    trace lacks to be simulated. `alone` is not empty for a
    trace without those of the other ranks: it says what was not checked. `omitted` says per code
    how many findings beyond `FINDINGS_PER_CODE` were left out of these lists.
    """

    errors: list[Finding] = field(default_factory=list[Finding])
    gaps: list[Finding] = field(default_factory=list[Finding])
    warnings: list[Finding] = field(default_factory=list[Finding])
    omitted: Counter[str] = field(default_factory=Counter[str])
    ranks: int = 0
    nodes: int = 0
    collectives: int = 0
    groups: int = 0
    sends: int = 0
    eager_only: Finding | None = None
    alone: Sequence[str] = ()
    _seen: Counter[str] = field(default_factory=Counter[str], repr=False)

    def ok(self) -> bool:
        """Whether nothing is wrong or missing; warnings do not count."""
        return not self.errors and not self.gaps

    def as_error(self) -> DiagnosticError:
        """The errors, for what cannot go on with them."""
        each = (Diagnostic(f"{f.path}: {f.message}", remedy=f.remedy) for f in self.errors)
        return DiagnosticError(*each)

    @property
    def verdict(self) -> Verdict:
        """`broken` where something contradicts, `incomplete` where something is missing."""
        if self.errors:
            return "broken"
        return "incomplete" if self.gaps else "well-formed"

    def error(
        self, path: Path, code: str, message: str, remedy: str, *, node: int | None = None
    ) -> None:
        """Add an error, or count it where its code has been reported often enough."""
        self.add(Severity.ERROR, Finding(path, node, code, message, remedy))

    def warning(self, path: Path, code: str, message: str, remedy: str) -> None:
        """Add a warning, or count it where its code has been reported often enough."""
        self.add(Severity.WARNING, Finding(path, None, code, message, remedy))

    def add(self, severity: Severity, finding: Finding) -> None:
        """Add a finding, or count it where its code has been reported often enough."""
        findings = {
            Severity.ERROR: self.errors,
            Severity.GAP: self.gaps,
            Severity.WARNING: self.warnings,
        }[severity]
        self._seen[finding.code] += 1
        if self._seen[finding.code] > FINDINGS_PER_CODE:
            self.omitted[finding.code] += 1
        else:
            findings.append(finding)
