"""What the ranks of several pods issue, as one step: a pod waits for what another one sends.

Ranks of a class do the same, so the clock has one of them. Where they meet different ranks of the
other pod, what comes is there for all of them when it is there for the last one.

    encoder   forward 0..40 (microbatches), send 40..50           gradient at 130, backward 130..170
    main                                    e at 50, forward, backward 50..130, send the gradient
"""

from __future__ import annotations

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
from stagec.time.step import Issued, host_costs

#: By pod and other pod, for each message the rank of that one that each rank meets.
Far = Mapping[str, Mapping[str, Sequence[Ints]]]


class IssuedPods:
    """What the ranks of all pods issue. Each pod begins on a node of its own."""

    def __init__(self, pods: Mapping[str, Issued], far: Far) -> None:
        self.pods, self.far = pods, far
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

    def graph(
        self, *, overlap: bool, one_stream: bool = False, eager: int | None = None
    ) -> StepGraph:
        """The graph of all classes, whose numbers follow each other."""
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
        """The times of hosts that spend so much time, by pod, and do nothing else."""
        each = zip(self.jobs, spent, strict=True)
        of_classes = [times for job, times in each for _ in job.classes]
        return ClockedStep(graph, host_costs(graph, of_classes))

    @cached_property
    def _senders(self) -> Mapping[tuple[str, int], Mapping[Channel, Sequence[Way]]]:
        """By pod and class there, who sends what it receives from other pods."""
        return {
            (pod, local): {way: list(self._sources(pod, ranks, way)) for way in ways}
            for pod, each in self.pods.items()
            for local, ranks in enumerate(each.members)
            for ways in [_far_channels(each.classes[local], "et.recv")]
        }

    def _sources(self, pod: str, ranks: Ints, way: Channel) -> Iterator[Way]:
        """The classes of another pod, and their ways, from which messages come that ranks of a pod
        receive: both say whom they meet."""
        other, number, stream = way[0], _number(way), way[2]
        if other not in self.pods:
            return
        peers, back = self.far[pod][other][number][ranks], self.far[other][pod]
        them = self.pods[other]
        for local, (each, members) in enumerate(zip(them.classes, them.members, strict=True)):
            inside = np.isin(peers, members)
            for sent in _far_channels(each, "et.send"):
                alike = sent[0] == pod and sent[2] == stream
                if alike and bool((back[_number(sent)][peers[inside]] == ranks[inside]).any()):
                    yield self._first[other] + local, sent


def _far_channels(each: RankClass, kind: str) -> list[Channel]:
    """The channels of a class to other pods, or from them."""
    ends = (op for op in each.graph.body.walk() if op.name == kind and crosses_pods(op))
    return list(dict.fromkeys(map(channel_of, ends)))


def _number(way: Channel) -> int:
    """The number of a message among those of all values."""
    number = way[1].value
    if number is None:
        raise ValueError(f"the number of a message is not a constant: {way[1]}")
    return number


def _moved(
    issue: ClassIssue, pod: str, first: int, far: Mapping[Channel, Sequence[Way]]
) -> ClassIssue:
    """What a class issues among those of all pods, where the classes of its own begin with
    `first`."""
    senders = {c: [(first + i, own) for i, own in ways] for c, ways in issue.senders.items()}
    members = {g: tuple(first + i for i in numbers) for g, numbers in issue.members.items()}
    name = f"{pod}/{issue.name}"
    return issue._replace(name=name, senders={**senders, **far}, members=members)
