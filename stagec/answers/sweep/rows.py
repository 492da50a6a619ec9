"""A row of a sweep: the figures of one configuration, or the reason of its failure."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.jobs.idle_flags import unscheduled, without_graphs
from stagec.jobs.request.machine import on_machine
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.time.costs.replay_options import ReplayOptions

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.jobs.figures import CompiledJob
    from stagec.jobs.lowered import LoweredJob
    from stagec.machines import Machine

SweepRow = dict[str, Any]
#: The compiler is not thread-safe, but a worker of a cluster may run several threads.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration: a job, and the machine of its time, if wanted. Without `overlap` all
    collectives are blocking; without `graphs` hosts issue steps of serving op by op. `measured` and
    `kernels_from` have measured times of `device`, which is the machine before its figures were
    changed, if they were; `used` has the `--used-ranks` of all machines."""

    options: JobOptions
    machine: Machine | None = None
    overlap: bool = True
    measured: tuple[Path, ...] = ()
    kernels_from: str | None = None
    device: Machine | None = None
    graphs: bool = True
    used: Mapping[str, int] | None = None


def rows(case: Case) -> Mapping[str, SweepRow]:
    """The row of a job: the largest figures of any rank and the time of the slowest class, or the
    reason of its failure. With pods that prefill and decode there is a row for each step, by its
    first pod."""
    session = Session()
    with _one_at_a_time:
        try:
            summaries = _summaries(case, session)
        except DiagnosticError as problem:
            return refused(problem)
        except NotAnIntegerError as problem:
            return {"": {"error": str(problem), "remedy": "choose sizes that divide each other"}}
    warnings = [d.message for d in session.diagnostics]
    return {pod: {**row, "warnings": warnings} for pod, row in summaries.items()}


def refused(problem: DiagnosticError) -> Mapping[str, SweepRow]:
    """The row of a configuration that failed."""
    first = problem.diagnostics[0]
    return {"": {"error": first.message, "remedy": first.remedy}}


def _summaries(case: Case, session: Session) -> Mapping[str, SweepRow]:
    from stagec.jobs.lowered import job_costs

    session.report(*unscheduled(case.options))
    job = job_costs(on_machine(case.options, case.machine), session)
    steps = {"": job} if case.machine is None else job.by_step
    return {pod: _summary(each, case, session) for pod, each in steps.items()}


def _summary(job: CompiledJob | LoweredJob, case: Case, session: Session) -> SweepRow:
    figures = job.figures()
    counts: SweepRow = {
        "model": job.name,
        **{name: getattr(figures, name) for name in ("ranks", "mesh", "parameters", "flops")},
        "sent_bytes": figures.sent,
        "peak_bytes": figures.peak,
        "host_bytes": figures.host,
        "memory": figures.categories,
    }
    if figures.pods:
        each = figures.pods.items()
        counts["pods"] = {pod: {"mesh": f.mesh, "peak_bytes": f.peak} for pod, f in each}
    if case.machine is None:
        return counts
    from stagec.answers.intervals import interval_row
    from stagec.jobs.request.measurements import measurements, remark_unused

    measured = measurements(case.measured, case.kernels_from, case.machine)
    if measured is not None:
        measured = measured.of(case.device or case.machine)
    timed = job.time(case.machine, ReplayOptions(case.overlap, case.graphs, measured))
    remark_unused(timed.costed_by, measured, session)
    if not case.graphs:
        issued = (each for pod in job.issued.values() for each in pod.jobs)
        session.report(*without_graphs(each.software for each in issued))
    fit = {} if timed.fit is None else {"fit": timed.fit.as_json()}
    of_stack = case.options.stack, case.machine, case.options.serve
    interval = interval_row(*of_stack, timed.step_seconds)
    return counts | {"time": {**time_row(timed), **interval}} | fit


def fits(row: Mapping[str, Any]) -> bool | None:
    """Whether the job of a row fits its limit, or its machine; None without either."""
    fits: bool | None = row.get("fits", row.get("fit", {}).get("fits"))
    return fits


def notes(row: Mapping[str, Any]) -> list[str]:
    """The warnings and cautions of a row that is a job."""
    return [*row["warnings"], *row.get("time", {}).get("cautions", ())]


def time_row(report: TimeReport) -> SweepRow:
    """The figures of a time in a row; shares are those of the slowest class."""
    step = report.step_seconds
    exposed = sum(time for part, time in report.breakdown.items() if part.startswith("exposed "))
    named = "machine", "step_seconds", "tokens_per_second", "tokens_per_second_per_rank", "mfu"
    return {
        **{name: getattr(report, name) for name in (*named, "hfu")},
        "bubble_share": report.breakdown.get("bubble", 0.0) / step,
        "exposed_share": exposed / step,
        "breakdown": dict(report.breakdown),
        "cautions": list(report.cautions),
    }
