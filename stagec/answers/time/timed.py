"""How long the steps of a job take: from its options to the reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stagec.answers.time.joined import JoinedPods, PodsPlans
from stagec.ir.serving import DECODE
from stagec.jobs.planned import Looks
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving import DISAGGREGATED
from stagec.jobs.session import Session
from stagec.pipeline.instrument import PLAN, Hooks

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
class TimedStep:
    """A step of `pods` that wait for each other, or of one: what they issue, and its time."""

    pods: Sequence[str]
    issued: IssuedStep
    report: TimeReport


@dataclass(frozen=True)
class Timed:
    """A job on a machine: its command line is of `options` and `overlap`. `each` is what each pod
    issues, `plans` are those of their memory, and `worst` the worst moments of the stages of each
    pod, if they were asked for; the steps are by their first pods."""

    options: JobOptions
    machine: Machine
    overlap: bool
    pods: Pods
    each: Mapping[str, Issued]
    steps: Mapping[str, TimedStep]
    plans: EventPlans | None
    worst: Mapping[str, Mapping[int, Mapping[str, Any]]]

    @property
    def report(self) -> TimeReport:
        """The time of the first step."""
        return next(iter(self.steps.values())).report

    @property
    def step(self) -> StepTime:
        """The replay of that step."""
        return self.report.step

    @property
    def issued(self) -> Issued:
        """What all pods issue, as pictures take it: the ranks of pods follow each other."""
        return JoinedPods(self.each) if self.pods.several else next(iter(self.each.values()))


class _Passes(Hooks):
    """Reports which of so many passes runs."""

    def __init__(self, count: int, progress: Callable[[str], None]) -> None:
        self._count, self._progress, self._done = count, progress, 0

    def before_pass(self, pass_: Pass, module: Module) -> None:
        self._progress(f"compiling, pass {self._done + 1} of {self._count}: {pass_.name}")

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self._done += 1


def time_job(
    options: JobOptions,
    machine: Machine,
    session: Session,
    *,
    overlap: bool = True,
    graphs: bool = True,
    levers: bool | None = None,
    measured: Measurements | None = None,
    memory: bool = False,
    worst: bool = False,
    peers: Mapping[str, Module] = MappingProxyType({}),
    progress: Callable[[str], None] = lambda text: None,
) -> Timed:
    """The time of a job's step, and what it was computed from; with `memory`, the plans of that
    too, with `worst` what is held at the worst moments. Of a pod that prefills and one that decodes
    it is the step of each, in which caches take no time on their way. Pods that are `peers` are
    met, and not compiled. `progress` is called with messages. Raises `DiagnosticError`."""
    from stagec.time.pods import IssuedPods
    from stagec.time.step import Issued

    pods = Pods.of(options, session, peers=peers)
    names = [*pods.builders]
    groups = [names[:-1], names[-1:]] if _decodes_apart(options, pods) else [names]
    # parts have one model
    counted = [*pods.every] if options.draft is not None else [first for first, *_ in groups]
    looks, watching = {pod: Looks() for pod in pods.every}, dict[str, list[Hooks]]()
    for pod, look in looks.items():
        passes = len(pods.first.loaded.pipeline(pods.passes(pod)).passes)
        asked = {"flops": pod in counted, "tokens": pod in counted, "early_peak": True}
        asked["early_worst"] = worst
        watching[pod] = look.watching(**asked, events=memory)
        watching[pod].append(_Passes(passes, progress))
    pods = pods.lower(watching, without=() if memory else {PLAN})
    progress("replaying the step on the machine")
    issued = {pod: Issued.of(module) for pod, module in pods.modules.items()}
    steps: dict[str, TimedStep] = {}
    for group in groups:
        pod, each = group[0], {name: issued[name] for name in group}
        together = IssuedPods(each, pods.peers_in_other_pod) if len(each) > 1 else issued[pod]
        report = report_of(
            pods.name,
            pods.modules[pod],
            together,
            machine,
            flops=pods.flops([n for n in group if n in counted], looks),
            tokens=looks[pod].tokens.found,
            peaks=[looks[name].early_peak.found for name in group],
            overlap=overlap,
            graphs=graphs,
            levers=levers,
            measured=measured,
        )
        steps[pod] = TimedStep(group, together, report)
    plans = _plans_of(pods, looks) if memory else None
    moments = {pod: looks[pod].early_worst.found or {} for pod in names}
    return Timed(options, machine, overlap, pods, issued, steps, plans, moments)


def _plans_of(pods: Pods, looks: Mapping[str, Looks]) -> EventPlans:
    found = {pod: looks[pod].events.needed("memory over time") for pod in pods.builders}
    if not pods.several:
        return next(iter(found.values()))
    return PodsPlans({id(pods.modules[pod]): plans for pod, plans in found.items()})


def _decodes_apart(options: JobOptions, pods: Pods) -> bool:
    """Whether one of the pods decodes what others prefill: it does not wait for them."""
    return options.serve == DISAGGREGATED and DECODE in pods.builders


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

    return time_report(
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


def _worst_fit(
    issued: IssuedStep, machine: Machine, peaks: Sequence[int | None]
) -> MemoryFit | None:
    """That of the job for which least is left; None if one was not planned."""
    from stagec.analysis.memory_fit import memory_fit

    jobs = zip(issued.jobs, peaks, strict=True)
    fits = [memory_fit(machine, job.mesh, peak) for job, peak in jobs if peak is not None]
    return min(fits, key=lambda fit: fit.by) if len(fits) == len(peaks) else None
