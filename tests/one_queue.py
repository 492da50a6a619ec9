"""Devices with one place for communication, as in ASTRA-sim: a collective or a send takes the place
when it is ready, those that were issued first before others, and leaves it when it is done. A
collective is done when all of its members have it in their places. Receives take no place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from stagec.program.nodes import Node


class Call(NamedTuple):
    """A call of a collective: the stages that it joins, and its number among their calls."""

    stages: tuple[int, ...]
    number: int


class Device:
    """The rank at a pipeline stage. `nodes` are in the order of issue; `axis` is that of the
    stages. Ranks of one stage do the same, so what joins only these is done at once."""

    def __init__(self, stage: int, nodes: Sequence[Node], stages: int, axis: str) -> None:
        self.stage, self.waiting, self.done = stage, list(nodes), set[Node]()
        self.place: Node | None = None
        self._stages, self._axis = stages, axis
        self.calls = dict(self._numbered(nodes))

    def _numbered(self, nodes: Sequence[Node]) -> Iterator[tuple[Node, Call]]:
        before = Counter[tuple[int, ...]]()
        for node in nodes:
            if node.is_collective:
                joined = self._joined(node)
                before[joined] += 1
                yield node, Call(joined, before[joined])

    def _joined(self, node: Node) -> tuple[int, ...]:
        if self._axis not in node.group.axes:
            return (self.stage,)
        pair = {self.stage, self._stages - 1 - self.stage}
        return tuple(sorted(pair)) if node.group.mirrored else tuple(range(self._stages))

    def ready(self) -> Iterator[Node]:
        """What waits for nothing but its turn."""
        return (n for n in self.waiting if self.done.issuperset((*n.deps, *n.after)))

    def end(self, node: Node) -> None:
        """A node is done."""
        self.done.add(node)
        self.waiting.remove(node)

    def message(self, node: Node) -> tuple[int, int, int]:
        """Sender, receiver and tag of a message."""
        if node.kind == "send":
            return self.stage, (self.stage + node.by) % self._stages, node.tag
        return (self.stage - node.by) % self._stages, self.stage, node.tag


def unfinished(programs: Mapping[int, Sequence[Node]], axis: str) -> dict[int, list[str]]:
    """The names of the nodes that never run, by stage. In each round a device does one computation
    and posts its receives; then what is ready first takes a free place."""
    devices = {s: Device(s, nodes, len(programs), axis) for s, nodes in programs.items()}
    sent: set[tuple[int, int, int]] = set()
    while any([_round(device, sent) for device in devices.values()] + [_joined(devices)]):
        pass
    return {s: [n.name for n in d.waiting] for s, d in devices.items() if d.waiting}


def _round(device: Device, sent: set[tuple[int, int, int]]) -> bool:
    """Whether a device did anything."""
    ready = list(device.ready())
    computed = [n for n in ready if n.is_computation or n.is_copy][:1]
    got = [n for n in ready if n.kind == "recv" and device.message(n) in sent]
    for node in (*computed, *got):
        device.end(node)
    if device.place is None:
        device.place = next((n for n in ready if n.is_collective or n.kind == "send"), None)
    taken = device.place
    if taken is not None and taken.kind == "send":
        sent.add(device.message(taken))
        device.end(taken)
        device.place = None
        return True
    return bool(computed or got)


def _joined(devices: Mapping[int, Device]) -> bool:
    """Whether a collective ended that all of its members have in their places."""
    ended = False
    for device in devices.values():
        if device.place is None:
            continue
        call = device.calls[device.place]
        members = [devices[s] for s in call.stages]
        if all(m.place is not None and m.calls[m.place] == call for m in members):
            ended = True
            for member in members:
                if member.place is not None:
                    member.end(member.place)
                    member.place = None
    return ended
