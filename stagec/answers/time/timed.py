"""The timing of the steps of a job: from its options to the reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from stagec.answers.time.joined import JoinedPods, PodsPlans
from stagec.jobs.lowered import LoweredJob, TimedStep
from stagec.jobs.planned import Looks
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.time.costs.replay_options import USUAL, ReplayOptions

if TYPE_CHECKING:
    from stagec.analysis.memory_events import EventPlans
    from stagec.analysis.time_report import TimeReport
    from stagec.ir.module import Module
    from stagec.machines import Machine
    from stagec.time.step import Issued, StepTime


@dataclass(frozen=True)
class Timed:
    """A timed job: its `options` and `replay` determine its command line. `each` has the programs
    of each pod, `plans` their memory over time, if requested, and `steps` are by the first pod of
    each."""

    options: JobOptions
    machine: Machine
    replay: ReplayOptions
    pods: Pods
    each: Mapping[str, Issued]
    steps: Mapping[str, TimedStep]
    plans: EventPlans | None

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
        """The programs of all pods, for pictures: the ranks of pods are concatenated."""
        return JoinedPods(self.each) if self.pods.several else next(iter(self.each.values()))


def time_job(
    options: JobOptions,
    machine: Machine,
    session: Session,
    replay: ReplayOptions = USUAL,
    *,
    levers: bool | None = None,
    memory: bool = False,
    peers: Mapping[str, Module] = MappingProxyType({}),
    progress: Callable[[str], None] = lambda text: None,
) -> Timed:
    """The timed step of a job, with its memory plans if `memory` is set. With a pod that prefills
    and one that decodes there are two steps, in which the transfer of caches takes no time. `peers`
    are modules of other pods that receive messages and are not timed. `progress` is called with
    messages. Raises `DiagnosticError`."""
    job = LoweredJob.of(options, session, memory=memory, peers=peers, progress=progress)
    progress("replaying the step on the machine")
    steps = job.steps(machine, replay, levers=levers)
    plans = _plans_of(job.pods, job.looks) if memory else None
    return Timed(options, machine, replay, job.pods, job.issued, steps, plans)


def _plans_of(pods: Pods, looks: Mapping[str, Looks]) -> EventPlans:
    plans_by_pod = {pod: looks[pod].events.needed("memory over time") for pod in pods.builders}
    if not pods.several:
        return next(iter(plans_by_pod.values()))
    return PodsPlans({id(pods.modules[pod]): plans for pod, plans in plans_by_pod.items()})
