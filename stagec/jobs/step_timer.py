"""Times steps on a machine, for answers with many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stagec.jobs.request.command_line import asked_words, step_command
from stagec.jobs.request.measurements import MEASURED, measurements, remark_unused
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.time.costs.replay_options import ReplayOptions

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.jobs.figures import CompiledJob
    from stagec.jobs.lowered import LoweredJob
    from stagec.machines import Machine
    from stagec.time.costs.nodes import Measurements


@dataclass(frozen=True)
class StepTimer:
    """Times steps on a machine, where `measured` times take precedence over models; `words` are the
    options of a command line for these. `costed_by` sums that of `TimeReport` over all steps."""

    machine: Machine
    measured: Measurements | None = None
    words: Sequence[str] = ()
    costed_by: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def of(cls, machine: Machine, given: Mapping[str, Any]) -> StepTimer:
        """The timer for these values of the options `MEASURED`. Raises `DiagnosticError`."""
        measured = measurements(given["measured"], given["kernels_from"], machine)
        return cls(machine, measured, [*asked_words(MEASURED, given)])

    def time(self, job: CompiledJob | LoweredJob) -> TimeReport:
        """The time of a job with one step. Raises `DiagnosticError`."""
        return self.counted(job.time(self.machine, ReplayOptions(measured=self.measured)))

    def alone(self, job: LoweredJob) -> Sequence[float]:
        """The seconds of each of several pods without waiting for others. Raises
        `DiagnosticError`."""
        return [*job.alone_seconds(self.machine, ReplayOptions(measured=self.measured)).values()]

    def counted(self, report: TimeReport) -> TimeReport:
        """Add the counts of a report of a step on this machine. Returns the report."""
        self.costed_by.update(report.costed_by)
        return report

    def command(self, options: JobOptions) -> str:
        """The command that times a step."""
        return step_command(options, self.machine, more=self.words)

    def measured_counts(self, session: Session) -> Mapping[str, int]:
        """The counts of kernels and collectives of all steps by the source of their times; empty
        without measured times. Reports a remark if no step has a measured time."""
        if self.measured is None:
            return {}
        remark_unused(self.costed_by, self.measured, session, "these steps")
        return dict(self.costed_by)
