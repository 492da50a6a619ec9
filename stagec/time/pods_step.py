"""A step of several pods, which wait for each other's messages.

One rank of each class stands for all. Where the ranks of a class meet different ranks of another
pod, a message arrives at all of them when it arrives at the last one.

    encoder   forward 0..40 (microbatches), send 40..50           gradient at 130, backward 130..170
    main                                    e at 50, forward, backward 50..130, send the gradient
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from stagec.machines import Level, Machine
from stagec.program.classes import RankClass
from stagec.program.groups import Channel, channel_of, crosses_pods
from stagec.program.nodes import Ints
from stagec.time.clock.graph import ClassIssue, StepGraph, Way, step_graph
from stagec.time.clock.hosts import HostTimes
from stagec.time.clock.times import ClockedStep
from stagec.time.costs.network import level_between_pods
from stagec.time.costs.nodes import PodEnd
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.step import Issued, host_costs, step_time

#: `peers[pod][other][message][rank]` is the rank of the other pod that a rank of the pod meets.
PodPeers = Mapping[str, Mapping[str, Sequence[Ints]]]


class IssuedPods:
    """What the ranks of all pods issue. Each pod begins on a node of its own."""

    def __init__(self, pods: Mapping[str, Issued], peers: PodPeers) -> None:
        self.pods, self.peers = pods, peers
        counts = [len(each.classes) for each in pods.values()]
        self._first = dict(zip(pods, accumulate(counts, initial=0), strict=False))
        self._graphs: dict[Hashable, StepGraph] = {}

    @property
    def jobs(self) -> Sequence[Issued]:
        """The pods, in order."""
        return list(self.pods.values())

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of all pods."""
        return {f"{pod}/{a}": n for pod, each in self.pods.items() for a, n in each.mesh.items()}

    def between(self, machine: Machine) -> Mapping[str, Level]:
        """The level of the network that joins the pods. Raises `DiagnosticError`."""
        return dict.fromkeys(self.pods, level_between_pods(machine, [e.mesh for e in self.jobs]))

    def elsewhere(self, machine: Machine, own: Machine) -> Mapping[str, PodEnd]:
        """The pods that run on another machine than `own`, where `machine` is that of the step:
        their machine, and the level of its network that joins them to other pods. Raises
        `DiagnosticError`."""
        machines = {p: job.software.machine_of(machine) for p, job in self.pods.items()}
        others = {p: each for p, each in machines.items() if each.name != own.name}
        return {p: (each, self.between(each)[p]) for p, each in others.items()}

    def graph(
        self, *, overlap: bool, one_stream: bool = False, eager: int | None = None
    ) -> StepGraph:
        """The graph of the classes of all pods, numbered pod by pod."""
        late = frozenset(node for each in self.jobs for node in each.waiting(eager))
        key = overlap, one_stream, late
        if key not in self._graphs:
            issues = [
                _moved(issue, pod, self._first[pod], self._senders[pod, local])
                for pod, each in self.pods.items()
                for local, issue in enumerate(each.issues())
            ]
            how = {"overlap": overlap, "one_stream": one_stream}
            self._graphs[key] = step_graph(issues, waits=late.__contains__, **how)
        return self._graphs[key]

    def hosts(self, spent: Sequence[HostTimes], graph: StepGraph) -> ClockedStep:
        """The clock of hosts that spend these times; `spent` has one entry for each pod."""
        each = zip(self.jobs, spent, strict=True)
        of_classes = [times for job, times in each for _ in job.classes]
        return ClockedStep(graph, host_costs(graph, of_classes))

    @cached_property
    def _senders(self) -> Mapping[tuple[str, int], Mapping[Channel, Sequence[Way]]]:
        """By pod and number of the class in it, the senders of each of its channels from other
        pods."""
        return {
            (pod, local): {way: list(self._sources(pod, ranks, way)) for way in ways}
            for pod, each in self.pods.items()
            for local, ranks in enumerate(each.members)
            for ways in [_pod_channels(each.classes[local], "et.recv")]
        }

    def _sources(self, pod: str, ranks: Ints, way: Channel) -> Iterator[Way]:
        """The classes of another pod that send what these ranks receive on a channel, each with its
        own channel: those whose peers and the peers of these ranks name each other."""
        other, number, stream = way[0], _number(way), way[2]
        if other not in self.pods:
            return
        peers, back = self.peers[pod][other][number][ranks], self.peers[other][pod]
        them = self.pods[other]
        for local, (each, members) in enumerate(zip(them.classes, them.members, strict=True)):
            inside = np.isin(peers, members)
            for sent in _pod_channels(each, "et.send"):
                alike = sent[0] == pod and sent[2] == stream
                if alike and bool((back[_number(sent)][peers[inside]] == ranks[inside]).any()):
                    yield self._first[other] + local, sent


def _pod_channels(each: RankClass, kind: str) -> list[Channel]:
    """The channels of a class to other pods (`et.send`), or from them (`et.recv`)."""
    ends = (op for op in each.graph.body.walk() if op.name == kind and crosses_pods(op))
    return list(dict.fromkeys(map(channel_of, ends)))


def _number(way: Channel) -> int:
    """The number of a message to another pod. Raises `ValueError` if it is not a constant."""
    number = way[1].value
    if number is None:
        raise ValueError(f"the number of a message is not a constant: {way[1]}")
    return number


def _moved(
    issue: ClassIssue, pod: str, first: int, others: Mapping[Channel, Sequence[Way]]
) -> ClassIssue:
    """What a class of a pod issues, with the numbers of classes in all pods: those of its own pod
    begin with `first`, `others` are its senders in other pods."""
    senders = {c: [(first + i, own) for i, own in ways] for c, ways in issue.senders.items()}
    members = {g: tuple(first + i for i in numbers) for g, numbers in issue.members.items()}
    name = f"{pod}/{issue.name}"
    return issue._replace(name=name, senders={**senders, **others}, members=members)


def alone_seconds(
    pods: Mapping[str, Issued], machine: Machine, replay: ReplayOptions = USUAL
) -> Mapping[str, float]:
    """The seconds of a step of each pod without waiting for others. Raises `DiagnosticError`."""
    return {pod: step_time(issued, machine, replay).seconds for pod, issued in pods.items()}
