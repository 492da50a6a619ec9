"""How long steps take on a machine, for answers that time many of them."""

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
    """Steps on a machine, where `measured` times win over the models; `words` of a command line
    ask for these. `costed_by` sums what `TimeReport` counts over the steps that were timed."""

    machine: Machine
    measured: Measurements | None = None
    words: Sequence[str] = ()
    costed_by: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def of(cls, machine: Machine, given: Mapping[str, Any]) -> StepTimer:
        """That of the values of the options `MEASURED`. Raises `DiagnosticError`."""
        measured = measurements(given["measured"], given["kernels_from"], machine)
        return cls(machine, measured, [*asked_words(MEASURED, given)])

    def time(self, job: CompiledJob | LoweredJob) -> TimeReport:
        """The time of a job of one step. Raises `DiagnosticError`."""
        return self.counted(job.time(self.machine, ReplayOptions(measured=self.measured)))

    def counted(self, report: TimeReport) -> TimeReport:
        """A report of a step of this machine, which counts from now on."""
        self.costed_by.update(report.costed_by)
        return report

    def command(self, options: JobOptions) -> str:
        """The command that times a step."""
        return step_command(options, self.machine, more=self.words)

    def measured_counts(self, session: Session) -> Mapping[str, int]:
        """Kernels and collectives of all steps by where their times are from; empty where nothing
        measured is given. Remarks on measured times of which no step takes one."""
        if self.measured is None:
            return {}
        remark_unused(self.costed_by, self.measured, session, "these steps")
        return dict(self.costed_by)
