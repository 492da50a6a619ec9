"""The findings of the trace checker, and the report that collects them.

For each code, a limited number of findings is kept; further ones are only counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from stagec.check.nodes import Severity
from stagec.support.diagnostics import Diagnostic, DiagnosticError

Verdict: TypeAlias = Literal["well-formed", "incomplete", "broken"]

FINDINGS_PER_CODE = 20
"""How many findings of one code a report keeps."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, its location, and a remedy.

    `node` is a node id in the file `path`, or None if the finding does not concern a single node.
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
    `groups` counts the communicator groups of the groups file. `eager_only` says why the job is
    free of deadlock only if sends do not wait for their receives, or is None. `gaps` list what a
    recorded trace lacks for simulation. `alone` says what was not checked because the traces of
    other ranks were missing. `omitted` counts, by code, the findings beyond `FINDINGS_PER_CODE`
    that are not in these lists.
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
        """Whether there are no errors and no gaps; warnings do not count."""
        return not self.errors and not self.gaps

    def as_error(self) -> DiagnosticError:
        """The errors as an exception."""
        each = (Diagnostic(f"{f.path}: {f.message}", remedy=f.remedy) for f in self.errors)
        return DiagnosticError(*each)

    @property
    def verdict(self) -> Verdict:
        """`broken` with errors, `incomplete` with gaps, otherwise `well-formed`."""
        if self.errors:
            return "broken"
        return "incomplete" if self.gaps else "well-formed"

    def error(
        self, path: Path, code: str, message: str, remedy: str, *, node: int | None = None
    ) -> None:
        """Add an error, or only count it after `FINDINGS_PER_CODE` of its code."""
        self.add(Severity.ERROR, Finding(path, node, code, message, remedy))

    def warning(self, path: Path, code: str, message: str, remedy: str) -> None:
        """Add a warning, or only count it after `FINDINGS_PER_CODE` of its code."""
        self.add(Severity.WARNING, Finding(path, None, code, message, remedy))

    def add(self, severity: Severity, finding: Finding) -> None:
        """Add a finding, or only count it after `FINDINGS_PER_CODE` of its code."""
        kept = {"error": self.errors, "gap": self.gaps, "warning": self.warnings}
        self._seen[finding.code] += 1
        if self._seen[finding.code] > FINDINGS_PER_CODE:
            self.omitted[finding.code] += 1
        else:
            kept[severity.value].append(finding)
