"""The timing of the steps of a job: from its options to the reports, and for pictures several pods
as one job: their programs and their memory over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from stagec.analysis.memory_events import EventPlans
from stagec.formats.base import Layout
from stagec.ir.module import Module
from stagec.jobs.lowered import LoweredJob, TimedStep
from stagec.jobs.planned import Looks
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.program.classes import RankClass
from stagec.program.nodes import Ints, Program
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.step import Issued, StepTime

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.formats.timeline.ranks import Replay


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


class JoinedPods(Issued):
    """The programs of the ranks of several pods, whose classes and ranks are concatenated. Graphs
    and groups remain those of each pod."""

    def __init__(self, pods: Mapping[str, Issued]) -> None:
        self._pods = list(pods.values())
        self.mesh = {a: n for each in self._pods for a, n in each.mesh.items()}

    @property
    def classes(self) -> list[RankClass]:
        """The classes of all pods."""
        return [item for each in self._pods for item in each.classes]

    @property
    def programs(self) -> list[Program]:
        """The program of each class."""
        return [item for each in self._pods for item in each.programs]

    @property
    def members(self) -> list[Ints]:
        """The ranks of each class."""
        starts = accumulate((each.groups.ranks for each in self._pods), initial=0)
        pods = zip(self._pods, starts, strict=False)
        return [ranks + start for each, start in pods for ranks in each.members]


class PodsPlans(EventPlans):
    """The plans of the modules of several pods, by the identity of the module."""

    def __init__(self, pods: Mapping[int, EventPlans]) -> None:
        self._pods = pods

    def annotate(self, each: RankClass, program: Program) -> Program:
        """The program of a class with the events of its nodes."""
        return self._pods[id(each.module)].annotate(each, program)


def replays_of(timed: Timed) -> Sequence[Replay]:
    """The replayed steps of a job in sequence: that of a pod which decodes begins after the
    transfer of all caches. Raises `DiagnosticError`."""
    from stagec.formats.timeline.ranks import Replay, replayed

    if not timed.pods.several:
        return [Replay.of(timed.issued, timed.step)]
    return replayed(timed.each, _layouts(timed), timed.machine, timed.replay)


def _layouts(timed: Timed) -> Mapping[str, Layout]:
    """The layout of each pod among the ranks of all."""
    from stagec.traces.pod_programs import one_behind_the_other

    ranks = (each.groups.ranks for each in timed.each.values())
    starts = dict(zip(timed.each, accumulate(ranks, initial=0), strict=False))
    other_pods = {
        pod: {other: [to + starts[other] for to in met] for other, met in others.items()}
        for pod, others in timed.pods.peers_in_other_pod.items()
    }
    own = [
        Layout(each.mesh, each.groups, other_pods=other_pods[pod])
        for pod, each in timed.each.items()
    ]
    return dict(zip(timed.each, one_behind_the_other(own), strict=True))
