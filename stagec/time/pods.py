"""What the ranks of several pods issue, as one step: a pod waits for what another one sends.

Ranks of a class do the same, so the clock has one of them. Where they meet different ranks of the
other pod, what comes is there for all of them when it is there for the last one.

    encoder   forward 0..40 (microbatches), send 40..50           gradient at 130, backward 130..170
    main                                    e at 50, forward, backward 50..130, send the gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from stagec.machines import Level, Machine
from stagec.program.classes import RankClass
from stagec.program.groups import Channel, channel_of, crosses_pods
from stagec.program.nodes import Ints
from stagec.time.clock.hosts import HostTimes, host_costs, never_late
from stagec.time.clock.join import Joined, Way
from stagec.time.clock.replay import ClassReplay
from stagec.time.clock.replayed import Plans, Replayed
from stagec.time.costs.network import level_between_pods
from stagec.time.step import Issued

#: By pod and other pod, for each message the rank of that one that each rank meets.
Far = Mapping[str, Mapping[str, Sequence[Ints]]]


class IssuedPods:
    """What the ranks of all pods issue. Each pod begins on a node of its own."""

    def __init__(self, pods: Mapping[str, Issued], far: Far) -> None:
        self.pods, self.far = pods, far
        counts = [len(each.classes) for each in pods.values()]
        self._first = dict(zip(pods, accumulate(counts, initial=0), strict=False))

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

    def plans(self, *, overlap: bool, one_stream: bool = False, eager: int | None = None) -> Plans:
        """The plans of all classes, whose numbers follow each other."""
        found = Plans()
        for pod, each in self.pods.items():
            plans = each.plans(overlap=overlap, one_stream=one_stream, eager=eager)
            for local, plan in enumerate(plans):
                found.append(_moved(plan, pod, self._first[pod], self._senders[pod, local]))
        return found

    def late_hosts(
        self,
        spent: Sequence[HostTimes],
        devices: Sequence[ClassReplay],
        *,
        overlap: bool,
        one_stream: bool = False,
    ) -> Replayed | None:
        """The replay of hosts that spend so much time, by pod. Hosts that compare what they call
        wait for each collective. None if they are never behind these devices."""
        checks = any(each.checks for each in spent)
        if not checks and never_late(devices, spent[0]):
            return None
        plans = self.plans(overlap=overlap and not checks, one_stream=one_stream)
        costs = [
            (number, partial(host_costs, times))
            for number, (job, times) in enumerate(zip(self.jobs, spent, strict=True))
            for _ in job.classes
        ]
        return Replayed(plans, costs)

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
        raise ValueError(f"the number of a message is open: {way[1]}")
    return number


def _moved(plan: Joined, pod: str, first: int, far: Mapping[Channel, Sequence[Way]]) -> Joined:
    """A plan among those of all pods, where the classes of its own begin with `first`."""
    senders = {c: [(first + i, own) for i, own in ways] for c, ways in plan.senders.items()}
    members = {g: tuple(first + i for i in numbers) for g, numbers in plan.members.items()}
    return plan._replace(name=f"{pod}/{plan.name}", senders={**senders, **far}, members=members)
