"""Several pods as one job, for pictures: their programs and their memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from stagec.analysis.memory_events import EventPlans
from stagec.program.classes import RankClass
from stagec.program.nodes import Ints, Program
from stagec.time.step import Issued

if TYPE_CHECKING:
    from stagec.answers.time.timed import Timed
    from stagec.formats.base import Layout
    from stagec.formats.timeline.ranks import Replay


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

    @cached_property
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
    from stagec.formats.base import Layout
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
