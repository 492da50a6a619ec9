"""How long a step of one job takes: from its options to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.planned import Planned
from stagec.driver.output.streams import tell
from stagec.driver.request.machine import tell_cautions
from stagec.driver.request.measurements import tell_unused
from stagec.driver.request.options import JobOptions
from stagec.pipeline.instrument import BUFFERS, PLAN, STATED, Hooks

if TYPE_CHECKING:
    from stagec.analysis.memory_events import EventPlans
    from stagec.analysis.memory_fit import MemoryFit
    from stagec.analysis.model_flops import ModelFlops
    from stagec.analysis.time_report import TimeReport
    from stagec.ir.expr import Expr
    from stagec.ir.module import Module
    from stagec.machines import Machine
    from stagec.pipeline.passes import Pass
    from stagec.time.costs.nodes import Measurements
    from stagec.time.step import Issued, IssuedStep, StepTime


@dataclass(frozen=True)
class Timed:
    """A job on a machine: its command line is of `options` and `overlap`; `plans` are those of its
    memory, if they were asked for."""

    options: JobOptions
    machine: Machine
    overlap: bool
    report: TimeReport
    issued: Issued
    plans: EventPlans | None

    @property
    def step(self) -> StepTime:
        """The replay of its step."""
        return self.report.step


class _Passes(Hooks):
    """Tells which of so many passes runs."""

    def __init__(self, count: int, progress: Callable[[str], None]) -> None:
        self._count, self._progress, self._done = count, progress, 0

    def before_pass(self, pass_: Pass, module: Module) -> None:
        self._progress(f"compiling, pass {self._done + 1} of {self._count}: {pass_.name}")

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self._done += 1


def time_job(
    options: JobOptions,
    machine: Machine,
    *,
    overlap: bool = True,
    graphs: bool = True,
    levers: bool | None = None,
    measured: Measurements | None = None,
    memory: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Timed:
    """The time of a job's step, and what it was found from; with `memory`, the plans of that too.
    `progress` is told what goes on. Raises `DiagnosticError`."""
    from stagec.analysis.footprint import peak_bytes
    from stagec.analysis.model_flops import model_flops, step_tokens
    from stagec.time.step import Issued

    builder = JobBuilder(options)
    flops, tokens = Planned(model_flops, *STATED), Planned(step_tokens, *STATED)
    peak, plans = Planned(peak_bytes, BUFFERS), _event_plans() if memory else None
    passes = _Passes(len(builder.loaded.pipeline(builder.pipeline_text()).passes), progress)
    module = (
        builder.lower(watching=[flops, tokens, peak, passes], without={PLAN})
        if plans is None
        else builder.lower(watching=[flops, tokens, peak, plans, passes])
    )
    progress("replaying the step on the machine")
    issued = Issued.of(module)
    report = report_of(
        builder.model_name,
        module,
        issued,
        machine,
        flops=flops.found,
        tokens=tokens.found,
        peaks=[peak.found],
        overlap=overlap,
        graphs=graphs,
        levers=levers,
        measured=measured,
    )
    found = None if plans is None else plans.needed("memory over time")
    return Timed(options, machine, overlap, report, issued, found)


def report_of(
    name: str,
    module: Module,
    issued: IssuedStep,
    machine: Machine,
    *,
    flops: ModelFlops | None,
    tokens: Expr | None,
    peaks: Sequence[int | None],
    overlap: bool = True,
    graphs: bool = True,
    levers: bool | None = None,
    measured: Measurements | None = None,
) -> TimeReport:
    """The time of a lowered module's step, whose FLOPs, tokens and peaks of memory, one for each of
    its jobs, were counted before. Raises `DiagnosticError`."""
    from stagec.analysis.model_flops import step_flops
    from stagec.analysis.time_report import time_report

    report = time_report(
        name,
        issued,
        machine,
        module.env,
        model_flops=None if flops is None else step_flops(flops, module.graphs),
        tokens=tokens,
        overlap=overlap,
        graphs=graphs,
        levers=levers,
        measured=measured,
        fit=lambda: _worst_fit(issued, machine, peaks),
    )
    tell_cautions(report.cautions)
    tell_unused(report, measured)
    if levers is None and not report.levers:
        tell("--levers tries what would help")
    return report


def _worst_fit(
    issued: IssuedStep, machine: Machine, peaks: Sequence[int | None]
) -> MemoryFit | None:
    """That of the job for which least is left; None if one was not planned."""
    from stagec.analysis.memory_fit import memory_fit

    jobs = zip(issued.jobs, peaks, strict=True)
    fits = [memory_fit(machine, job.mesh, peak) for job, peak in jobs if peak is not None]
    return min(fits, key=lambda fit: fit.by) if len(fits) == len(peaks) else None


def _event_plans() -> Planned[EventPlans]:
    from stagec.analysis.memory_events import EventPlans

    return Planned(EventPlans)
