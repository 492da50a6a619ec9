"""A compiled job of one or several pods: what these issue, their figures, and the times of its
steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from stagec.analysis.figures import FigureFormulas, Figures, MemoryFigures, joined_figures
from stagec.analysis.memory_fit import MemoryFit, memory_fit
from stagec.analysis.model_flops import step_flops
from stagec.ir.module import Module
from stagec.jobs.builder import count_copies
from stagec.jobs.figures import CompiledJob
from stagec.jobs.planned import Looks
from stagec.jobs.pod_options import has_pods
from stagec.jobs.pods import Pods
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.machine import own_machine
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.pipeline.instrument import PLAN, Hooks
from stagec.pipeline.passes import Pass
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.pods_step import alone_seconds
from stagec.time.step import Issued, IssuedStep

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport


@dataclass(frozen=True)
class TimedStep:
    """A step of one pod, or of pods that wait for each other: what they issue, and its time."""

    issued: IssuedStep
    report: TimeReport


class _Passes(Hooks):
    """Reports which of `count` passes runs."""

    def __init__(self, count: int, progress: Callable[[str], None]) -> None:
        self._count, self._progress, self._done = count, progress, 0

    def before_pass(self, pass_: Pass, module: Module) -> None:
        self._progress(f"compiling, pass {self._done + 1} of {self._count}: {pass_.name}")

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self._done += 1


@dataclass(frozen=True)
class LoweredJob:
    """The lowered pods of a job, and the observations made while each was compiled (`looks`)."""

    pods: Pods
    looks: Mapping[str, Looks] = field(repr=False)

    @classmethod
    def of(
        cls,
        options: JobOptions,
        session: Session | None = None,
        *,
        figures: bool = False,
        memory: bool = False,
        peers: Mapping[str, Module] = MappingProxyType({}),
        progress: Callable[[str], None] = lambda text: None,
    ) -> LoweredJob:
        """Compile a job. `figures` and `memory` say whether its figures, and its memory over time,
        are needed. Pods in `peers` are given as modules and not compiled. `progress` is called with
        messages. Raises `DiagnosticError`."""
        pods = Pods.of(options, session, peers=peers)
        for builder in pods.every.values():
            count_copies(builder.module)
        looks, watching = {pod: Looks() for pod in pods.every}, dict[str, list[Hooks]]()
        for pod, look in looks.items():
            passes = len(pods.first.loaded.pipeline(pods.passes(pod)).passes)
            asked = {"flops": True, "tokens": True, "early_peak": True, "moments": figures}
            watching[pod] = [*look.watching(**asked, events=memory), _Passes(passes, progress)]
        return cls(pods.lower(watching, without=() if memory or figures else {PLAN}), looks)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.pods.name

    @cached_property
    def issued(self) -> Mapping[str, Issued]:
        """What each pod issues."""
        return {pod: Issued.of(module) for pod, module in self.pods.modules.items()}

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The pods of each step. Pods of one step wait for each other; a pod that decodes does not
        wait for the one that prefills, so each has a step of its own."""
        steps: dict[str | None, list[str]] = {}
        for pod, builder in self.pods.builders.items():
            steps.setdefault(builder.options.serve, []).append(pod)
        return [*steps.values()]

    def steps(
        self, machine: Machine, replay: ReplayOptions = USUAL, *, levers: bool | None = None
    ) -> Mapping[str, TimedStep]:
        """The time of each step, by its first pod. The transfer of caches between steps takes no
        time here. Raises `DiagnosticError`."""
        from stagec.analysis.time_report import time_report
        from stagec.time.pods_step import IssuedPods

        steps: dict[str, TimedStep] = {}
        for group in self.groups:
            pod, each = group[0], {name: self.issued[name] for name in group}
            peers = self.pods.peers_in_other_pod
            together = IssuedPods(each, peers) if len(each) > 1 else self.issued[pod]
            # parts of a model share its FLOPs, a draft model has its own
            counted = [pod] if self.pods.first.options.draft is None else group
            flops, module = self.pods.flops(counted, self.looks), self.pods.modules[pod]
            peaks = [self.looks[name].early_peak.result for name in group]
            report = time_report(
                self.name,
                together,
                machine,
                module.env,
                model_flops=None if flops is None else step_flops(flops, module.graphs),
                tokens=self.looks[pod].tokens.result,
                replay=replay,
                levers=levers,
                fit=partial(_worst_fit, machine, together.jobs, peaks),
            )
            steps[pod] = TimedStep(together, report)
        return steps

    def alone_seconds(self, machine: Machine, replay: ReplayOptions = USUAL) -> Mapping[str, float]:
        """The seconds of each of several pods without waiting for others. Raises
        `DiagnosticError`."""
        return alone_seconds(self.issued, machine, replay) if self.pods.several else {}

    # -- the interface of `CompiledJob` ------------------------------------------------------------

    @property
    def by_step(self) -> Mapping[str, LoweredJob]:
        """The job of each step, by its first pod; a single step has the empty name."""
        if len(self.groups) == 1:
            return {"": self}
        every = self.pods.builders
        each = {pods[0]: {pod: every[pod] for pod in pods} for pods in self.groups}
        return {p: replace(self, pods=replace(self.pods, builders=b)) for p, b in each.items()}

    def figures(self) -> Figures:
        """The figures of the job. Raises `DiagnosticError`."""
        return self._figures

    def memory_figures(self) -> MemoryFigures:
        """The figures of the memory of its ranks. Raises `DiagnosticError`."""
        return self._figures

    @cached_property
    def _figures(self) -> Figures:
        figures: dict[str, Figures] = {}
        for pod, module in self.pods.modules.items():
            moments = self.looks[pod].moments.needed("a job of several pods")
            figures[pod] = FigureFormulas(module, moments).at(module.env)
        return joined_figures(figures, twice=[pod for group in self.groups[1:] for pod in group])

    def time(
        self, machine: Machine, replay: ReplayOptions = USUAL, *, levers: bool = False
    ) -> TimeReport:
        """The time of a job with one step on a machine. Raises `DiagnosticError`."""
        (step,) = self.steps(machine, replay, levers=levers).values()
        return step.report


def job_costs(options: JobOptions, session: Session | None = None) -> CompiledJob | LoweredJob:
    """A job compiled for its figures and times. Jobs of one pod that differ in sizes share a
    compile. Raises `DiagnosticError`."""
    if has_pods(options):
        return LoweredJob.of(options, session, figures=True)
    return CompiledJob.of(options, session)


def rooms_of(
    job: CompiledJob | LoweredJob,
    figures: MemoryFigures,
    machine: Machine,
    limit: Limit | None = None,
) -> list[int]:
    """The bytes that a rank may use, for each of `figures.each`: those of the limit, or else of the
    pod's own machine, if the job runs on `machine`. Raises `DiagnosticError`."""
    from stagec.analysis.memory_fit import room_of

    if limit is not None and limit.text != AT_HAND:
        return [limit.room(each.mesh) for each in figures.each]
    if isinstance(job, CompiledJob) or not figures.pods:
        return [room_of(machine, figures.mesh)]
    pods = job.pods.builders
    own = {pod: own_machine(pods[pod].options, machine) for pod in figures.pods}
    return [room_of(own[pod], each.mesh) for pod, each in figures.pods.items()]


def _worst_fit(
    machine: Machine, jobs: Sequence[Issued], peaks: Sequence[int | None]
) -> MemoryFit | None:
    """The fit of the job with least memory left; None if one of them has no memory plan."""
    each = ((job, peak) for job, peak in zip(jobs, peaks, strict=True) if peak is not None)
    fits = [memory_fit(j.software.machine_of(machine), j.mesh, peak) for j, peak in each]
    return min(fits, key=lambda fit: fit.by) if len(fits) == len(peaks) else None
