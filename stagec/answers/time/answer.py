"""The time of a step on a machine, its breakdown, and the effect of better machines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TextIO

from stagec.analysis.memory_fit import MemoryFit
from stagec.analysis.time_report import TimeReport
from stagec.answers.intervals import StackErrors, kind_of, stack_errors
from stagec.answers.time.pods_answer import PodsTime, transfer_of, turn_seconds
from stagec.answers.time.table import (
    accepted_text,
    interval_text,
    print_time,
    rate_unit,
    seconds_text,
)
from stagec.answers.time.timed import Timed, time_job
from stagec.ir.serving_step import PREFILL
from stagec.jobs.figures import CompiledJob
from stagec.jobs.idle_flags import unscheduled, without_graphs
from stagec.jobs.pod_options import has_pods
from stagec.jobs.request.acceptance import Acceptance
from stagec.jobs.request.command_line import step_command
from stagec.jobs.request.machine import on_machine
from stagec.jobs.request.measurements import remark_unused
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.output.report import Report
from stagec.output.svg_text import SVGText
from stagec.output.tables import console
from stagec.time.costs.replay_options import ReplayOptions
from stagec.time.pods_step import alone_seconds
from stagec.time.step import Issued

NOT_GIVEN = Acceptance(1.0, 1, given=False)


@dataclass(frozen=True)
class StepAnswer(TimeReport, Report):
    """The time of a step with its breakdown, of one pod or of several that wait for each other:
    `alone_seconds` are those of each pod without waiting, and `turn_seconds` those of a draft model
    and of its main model on the same ranks. `serve` is the kind of a step of serving, `stack` names
    the software stack, and `errors` has its prediction intervals. `drawn` computes the data of
    pictures."""

    serve: str | None
    stack: str
    accepted: Acceptance
    alone_seconds: Mapping[str, float]
    turn_seconds: Mapping[str, float]
    errors: StackErrors | None
    drawn: Callable[[], Timed] = field(repr=False, compare=False)

    @property
    def title(self) -> str:
        return f"{self.model} on {self.machine}"

    @property
    def memory(self) -> MemoryFit | None:
        """The peak of a rank in bytes, and whether it fits the machine: `peak`, `room`, `fits`."""
        return self.fit

    def as_json(self) -> dict[str, Any]:
        each = {"alone_seconds": self.alone_seconds, "turn_seconds": self.turn_seconds}
        pods = {name: dict(seconds) for name, seconds in each.items() if seconds}
        return {
            **super().as_json(),
            "stack": self.stack,
            **({} if self.errors is None else {"interval": self.interval}),
            **self._served(),
            **pods,
        }

    @property
    def interval(self) -> dict[str, Any] | None:
        """The range of seconds that would cover 8 of 10 measurements of this step, and the number
        of measurements behind it; None without measurements."""
        kind = kind_of(self.serve)
        return None if self.errors is None else self.errors.of(kind, self.step_seconds)

    def _served(self) -> dict[str, Any]:
        """The entry of a step of serving: the time to the first token, or for each further one."""
        if self.serve is None:
            return {}
        if self.serve == PREFILL:
            return {"serving": {"mode": PREFILL, "ttft_seconds": self.step_seconds}}
        accepted = {"accepted": self.accepted.tokens} if self.accepted.speculates else {}
        each = self.step_seconds / self.accepted.tokens
        return {"serving": {"mode": self.serve, "tpot_seconds": each, **accepted}}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks: seconds, by part."""
        return [
            {"class": each.name, "ranks": each.ranks, "seconds": each.seconds, **each.breakdown}
            for each in self.classes
        ]

    def page(self) -> str:
        """The activity and memory of every rank over the step, which is compiled again if its
        memory was not planned. Raises `DiagnosticError`."""
        from stagec.answers.time.time_page import step_page

        return step_page(self.drawn(), self)

    def plot(self) -> SVGText:
        from stagec.answers.time.time_page import step_plot

        return SVGText(step_plot(self.drawn(), self).svg())

    def print(self, stream: TextIO) -> None:
        measured = "" if self.errors is None else self.errors.rows_text(kind_of(self.serve))
        interval = measured and interval_text(self.interval, measured)
        print_time(self, stream, self.stack, interval, tokens=rate_unit(self.accepted))
        pods = {"Without waiting for other pods": self.alone_seconds, "By turns": self.turn_seconds}
        for text, seconds in pods.items():
            each = ", ".join(f"{pod} {seconds_text(s)}" for pod, s in seconds.items())
            if each:
                console(stream).print(f"{text}: {each}")
        stream.write(accepted_text(self.step_seconds, self.accepted))


def _remark(
    report: TimeReport,
    issued: Mapping[str, Issued],
    replay: ReplayOptions,
    levers: bool | None,
    session: Session,
) -> None:
    """Report the cautions of a time, measurements and flags without effect on what is `issued`, and
    `--levers` if it was not run."""
    session.remark(*report.cautions)
    remark_unused(report.costed_by, replay.measured, session)
    if not replay.graphs:
        jobs = (job for each in issued.values() for job in each.jobs)
        session.report(*without_graphs(job.software for job in jobs))
    if levers is None and not report.levers:
        session.log("--levers times what would help")


def time(
    options: JobOptions,
    machine: Machine,
    session: Session,
    replay: ReplayOptions,
    *,
    levers: bool | None = None,
    accepted: Acceptance = NOT_GIVEN,
    memory: bool = False,
    again: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> StepAnswer | PodsTime:
    """The time of a step. `levers` says whether to time better machines too: by default for steps
    of few actions. With `memory`, the memory plans that pictures need are made too. With `again`,
    the structure of a job of one pod is compiled once per process and reused for other sizes and
    degrees. `progress` is called with messages. Raises `DiagnosticError`."""
    options = on_machine(options, machine)
    session.report(*unscheduled(options))
    alone: Mapping[str, float] = {}
    turns: Mapping[str, float] = {}
    drawn: Callable[[], Timed] = partial(_with_memory, options, machine, replay)
    if again and not has_pods(options):
        job = CompiledJob.of(options, session)
        report = job.time(machine, replay, levers=bool(levers))
        _remark(report, job.issued, replay, levers, session)
    else:
        timed = time_job(
            options, machine, session, replay, levers=levers, memory=memory, progress=progress
        )
        report = timed.report
        drawn = (lambda: timed) if memory else drawn
        for step in timed.steps.values():
            _remark(step.report, timed.each, replay, levers, session)
        if options.serve == DISAGGREGATED:
            sent = transfer_of(timed)
            reports = {pod: step.report for pod, step in timed.steps.items()}
            command = step_command(options, machine, overlap=replay.overlap)
            return PodsTime(reports, options.stack, sent, accepted, command, drawn)
        pods: Mapping[str, Issued] = timed.each if timed.pods.several else {}
        alone, turns = alone_seconds(pods, machine, replay), turn_seconds(timed)
    each = {f.name: getattr(report, f.name) for f in fields(TimeReport)}
    return StepAnswer(
        **each,
        serve=options.serve,
        stack=options.stack,
        accepted=accepted,
        alone_seconds=alone,
        turn_seconds=turns,
        errors=stack_errors(options.stack, machine),
        drawn=drawn,
    )


def _with_memory(options: JobOptions, machine: Machine, replay: ReplayOptions) -> Timed:
    """A step timed again, with its memory; diagnostics are dropped, since they were reported
    before. Raises `DiagnosticError`."""
    return time_job(options, machine, Session(), replay, levers=False, memory=True)
