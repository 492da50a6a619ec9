"""The cost of each node on a machine: of kernels by their extents, of collectives and messages by
the levels of the network between the ranks that they join.

The clock has one rank for each class, so a collective costs as much as in the slowest group of the
class, and a message as much as between the two ranks that are furthest apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, prod
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from stagec.ir.kernel import ON_HOST, continues
from stagec.ir_spec.strategy.collectives import LIBRARY, TWO_SHOT
from stagec.machines import Level, Machine
from stagec.program.groups import GroupAxes, Groups, crosses_pods, neighbours
from stagec.program.kernels import Kernel
from stagec.program.nodes import Ints, Node
from stagec.support.diagnostics import error
from stagec.time.costs.eager import launches_of
from stagec.time.costs.host_update import host_update_seconds
from stagec.time.costs.kernels import seconds_in_step
from stagec.time.costs.network import (
    Floats,
    Span,
    collective_seconds,
    direct_seconds,
    level_between,
    message_seconds,
    once_a_node,
    spans,
)
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.costs.software import Software
from stagec.time.measured.tables import NOT_FOUND, Measured, Table
from stagec.time.streams import PICOSECONDS, Cost

#: `send` or `recv`, the axis, and the coordinate of the receiver less that of the sender.
Way = tuple[str, str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """The levels that each of several groups crosses; there is one object for equal ones."""

    groups: tuple[tuple[Span, ...], ...]


@lru_cache(maxsize=1 << 10)
def _examples(groups: tuple[tuple[Span, ...], ...]) -> Examples:
    return Examples(groups)


class Measurements:
    """Measured times, which take precedence over models: `own` of users' files, then `others`.

    A collective of the users' files serves every group with as many ranks; one of `others`, which
    were measured within a node, serves groups within the innermost level.

    `device` is the measured machine, where that is known: on a machine with other figures the times
    of the tables are scaled by the ratio of the models on both.
    """

    def __init__(
        self, own: Sequence[Table] = (), others: Sequence[Table] = (), device: Machine | None = None
    ) -> None:
        self.device = device
        mine = {(t.kind, t.dtype, t.causal, t.op) for t in own}
        rest = [t for t in others if (t.kind, t.dtype, t.causal, t.op) not in mine]
        self.kernels = Measured([*own, *rest])
        self._collectives = Measured(own), Measured(rest)

    def of(self, device: Machine) -> Measurements:
        """The same measurements, taken on this device."""
        copied = copy(self)
        copied.device = device
        return copied

    @property
    def any(self) -> bool:
        """Whether there is any table."""
        return any(self._collectives)

    def collective(
        self, kind: str, size: int, over: Sequence[Span], machine: Machine
    ) -> tuple[float, int] | None:
        """Seconds of a collective of `size` bytes in a group with these spans, and how they were
        looked up (`MATCHED` or `INTERPOLATED`); None if no table has them."""
        if not over:
            return None
        inside = over[-1].level.name == machine.network[0].name
        asked = [Kernel(kind, "", (over[-1].size, size), 0, size)]
        for table in self._collectives if inside else self._collectives[:1]:
            seconds, ways = table.seconds(asked)
            if ways[0] != NOT_FOUND:
                return float(seconds[0]), int(ways[0])
        return None


@dataclass(frozen=True, slots=True)
class Distances:
    """The distances between the members of each group of a class, and between its ranks and their
    neighbours: for each group the example groups that stand for it, for each direction of messages
    the outermost level."""

    groups: Mapping[GroupAxes, Examples]
    messages: Mapping[Way, Level]

    def of(self, node: Node) -> Hashable:
        """A key that is equal for classes in which a node has the same distance."""
        if node.is_message:
            level = self.messages.get((node.kind, node.over, node.by))
            return level and level.name
        return self.groups.get(node.group)


#: A machine, and the level of its network that joins its pod to others.
PodEnd: TypeAlias = tuple[Machine, Level]


class CostTable:
    """The costs of the nodes of a job on a machine, each computed once. `pods` has the levels of
    the network to other pods; messages to a pod without a level take no time. A message to one that
    runs `elsewhere` takes as long as on the slower of both machines. `software` says with which
    constants the machine runs."""

    def __init__(
        self,
        machine: Machine,
        mesh: Mapping[str, int],
        *,
        replay: ReplayOptions = USUAL,
        communicates: bool = True,
        pods: Mapping[str, Level] = MappingProxyType({}),
        elsewhere: Mapping[str, PodEnd] = MappingProxyType({}),
        software: Software | None = None,
    ) -> None:
        self._pods, self._elsewhere = pods, elsewhere
        self._communicates, self._measured = communicates, replay.measured or Measurements()
        #: How many kernels and collectives were matched, interpolated, and modelled.
        self.ways: Counter[int] = Counter()
        software = software or Software()
        self._machine = software.on(machine).for_mesh(mesh)
        self._mesh, self._overlap = mesh, replay.overlap
        self._direct = software.collectives
        device = self._measured.device
        self._device = None if device is None or device is machine else software.on(device)
        self._launch = picoseconds(self._machine.compute.launch.value)
        self._known: dict[Hashable, Cost] = {}
        self._crossed: dict[GroupAxes, tuple[Sequence[tuple[Span, ...]], Ints]] = {}
        self._peers: dict[tuple[str, int], Ints] = {}

    def prepare(self, nodes: Sequence[Node]) -> dict[int, Cost]:
        """The costs of all computations among these nodes, by their places."""
        kernels = list({n.kernel for n in nodes if n.kernel is not None} - self._known.keys())
        seconds, ways = self._measured.kernels.seconds(kernels)
        modelled = ways == NOT_FOUND
        unknown = [k for k, is_unknown in zip(kernels, modelled, strict=True) if is_unknown]
        if self._device is not None:
            known = [k for k, is_unknown in zip(kernels, modelled, strict=True) if not is_unknown]
            before, after = (seconds_in_step(m, known) for m in (self._device, self._machine))
            seconds[~modelled] *= _ratio(after, before)
        seconds[modelled] = seconds_in_step(self._machine, unknown)
        for i, kernel in enumerate(kernels):
            if kernel.form == ON_HOST:
                ranks = prod(self._mesh.values())
                seconds[i] = host_update_seconds(self._machine, kernel.bytes, ranks)
        for kernel, time in zip(kernels, seconds.tolist(), strict=True):
            alone = not continues(kernel.form, self._machine.family)
            launch = alone * launches_of(kernel.form) * self._launch
            self._known[kernel] = Cost(picoseconds(time), launch)
        self.ways.update(ways.tolist())
        return {i: self._known[n.kernel] for i, n in enumerate(nodes) if n.is_computation}

    def prepare_collectives(self, asked: Iterable[tuple[Node, Distances]]) -> None:
        """Compute the costs of the collectives among these nodes that are modelled, with one array
        of sizes for each kind and group."""
        sizes: dict[tuple[str, Examples, bool], dict[int, None]] = {}
        for node, distances in asked if self._communicates else ():
            examples = distances.groups.get(node.group)
            beside = self._overlap and not node.blocking
            key = node.kind, node.size, examples, beside, node.dealt
            if examples is not None and not any(node.dealt) and key not in self._known:
                sizes.setdefault((node.kind, examples, beside), {})[node.size] = None
        for (kind, examples, beside), some in sizes.items():
            if self._measured.any or self._is_direct(kind):
                continue
            given = np.array([*some], dtype=np.float64)
            each = [collective_seconds(self._machine, kind, given, o) for o in examples.groups]
            self.ways[NOT_FOUND] += len(given) * len(each)
            times = np.maximum.reduce(each) * self._slowed(beside)
            for size, seconds in zip(some, times.tolist(), strict=True):
                key = kind, size, examples, beside, (0, 0)
                self._known[key] = Cost(picoseconds(seconds))

    @property
    def network(self) -> Sequence[Level]:
        """The levels of the network, on which distances depend."""
        return self._machine.network

    def distances(
        self, ranks: Ints, groups: Groups, used: Iterable[GroupAxes], ways: Iterable[Way]
    ) -> Distances:
        """The distances of a class with these ranks; `used` are the axes of its collectives, `ways`
        the directions of its messages."""
        return Distances(
            {axes: self._groups(ranks, groups, axes) for axes in used},
            {way: self._furthest(ranks, *way) for way in ways},
        )

    def cost(self, node: Node, distances: Distances) -> Cost:
        """The cost of a node of a class with these distances; computations must be prepared."""
        examples = distances.groups.get(node.group)
        if examples is not None and self._communicates:
            return self._of_collective(node, examples)
        if node.is_computation:
            return self._known[node.kernel]
        if node.is_copy:
            host = self._machine.host
            return Cost(picoseconds(host.latency.value + node.size / host.bandwidth.value))
        if self._communicates and node.is_message:
            way = node.kind, node.over, node.by
            level = self._pods.get(node.over) if crosses_pods(node.op) else distances.messages[way]
            if level is None:
                return Cost(0)
            other = self._elsewhere.get(node.over) if crosses_pods(node.op) else None
            key: Hashable = "message", node.size, level.name, other and node.over
            if key not in self._known:
                self._known[key] = self._message(node.size, (self._machine, level), other)
            return self._known[key]
        return Cost(0)

    def _of_collective(self, node: Node, examples: Examples) -> Cost:
        beside = self._overlap and not node.blocking
        key = node.kind, node.size, examples, beside, node.dealt
        if key not in self._known:
            times = [self._collective(node, over) for over in examples.groups]
            self._known[key] = Cost(picoseconds(max(times) * self._slowed(beside)))
        return self._known[key]

    def _slowed(self, beside: bool) -> float:
        """The factor by which a collective takes longer, if it runs beside computations."""
        return self._machine.efficiency.interference.collectives if beside else 1.0

    def _message(self, size: int, *ends: PodEnd | None) -> Cost:
        def slower(size: int) -> int:
            each = (message_seconds(end[0], size, end[1]) for end in ends if end is not None)
            return picoseconds(max(each))

        waiting = self._machine.efficiency.rendezvous
        if waiting is None or size <= waiting.above:
            return Cost(slower(size))
        return Cost(slower(size), handshake=slower(waiting.handshake))

    def _collective(self, node: Node, over: Sequence[Span]) -> float:
        kind, size = node.kind, node.size
        if any(node.dealt):
            self.ways[NOT_FOUND] += 1
            return float(once_a_node(self._machine, size, over, *node.dealt))
        measured = self._measured.collective(kind, size, over, self._machine)
        if measured is not None:
            seconds, way = measured
            self.ways[way] += 1
            if self._device is None:
                return seconds
            asked = (collective_seconds(m, kind, size, over) for m in (self._machine, self._device))
            return seconds * float(_ratio(*map(np.asarray, asked)))
        self.ways[NOT_FOUND] += 1
        library = collective_seconds(self._machine, kind, size, over)
        return min(library, self._direct_seconds(kind, size, over))

    def _direct_seconds(self, kind: str, size: int, over: Sequence[Span]) -> float:
        """Seconds by a communication kernel of the engine; infinity if it has none for this."""
        rule = self._direct
        if not self._is_direct(kind) or size > rule.below:
            return inf
        read = (over[0].size - 1) * size
        two_shot = rule.all_reduce == TWO_SHOT or 0 < rule.reads < read
        return direct_seconds(self._machine, size, over, two_shot=two_shot)

    def _is_direct(self, kind: str) -> bool:
        """Whether the engine may have a communication kernel for a kind of collective."""
        return kind == "all_reduce" and self._direct.all_reduce != LIBRARY

    # -- distances ---------------------------------------------------------------------------------

    def _groups(self, ranks: Ints, groups: Groups, axes: GroupAxes) -> Examples:
        """The levels that the groups of these ranks cross, once for all that cross the same."""
        if axes not in self._crossed:
            self._crossed[axes] = self._cross(groups.members[axes])
        examples, like = self._crossed[axes]
        numbers = groups.number[axes][ranks] - groups.first[axes]
        used = np.flatnonzero(np.bincount(like[numbers], minlength=len(examples)))
        return _examples(tuple(dict.fromkeys(examples[i] for i in used.tolist())))

    def _cross(self, members: Ints) -> tuple[Sequence[tuple[Span, ...]], Ints]:
        """The levels that groups cross, once for all that cross the same, and for each group its
        place among them."""
        rows = np.sort(members, axis=1)
        alike = [rows[:, 1:] - rows[:, :-1]]
        for level in self._machine.network:
            if level.unit is not None:
                units = rows // level.unit
                alike.append(units - units[:, :1])
        number: dict[bytes, int] = {}
        first: list[int] = []
        like: list[int] = []
        for i, row in enumerate(np.hstack(alike)):
            like.append(number.setdefault(row.tobytes(), len(first)))
            if like[-1] == len(first):
                first.append(i)
        return [spans(self._machine, rows[i]) for i in first], np.array(like, dtype=np.int64)

    def _furthest(self, ranks: Ints, kind: str, over: str, by: int) -> Level:
        """The outermost level between any of these ranks and its neighbour."""
        way = over, by if kind == "send" else -by
        if way not in self._peers:
            everyone = np.arange(prod(self._mesh.values()), dtype=np.int64)
            self._peers[way] = neighbours(self._mesh, *way, everyone)
        peers = self._peers[way][ranks]
        levels = (
            level
            for level in self._machine.network
            if level.unit is None or bool((ranks // level.unit == peers // level.unit).all())
        )
        return next(levels, None) or level_between(self._machine, int(ranks[-1]), int(peers[-1]))


def _ratio(after: Floats, before: Floats) -> Floats:
    """The factors by which times change; 1 where they were 0."""
    return np.divide(after, before, out=np.ones_like(before), where=before > 0)


def picoseconds(seconds: float) -> int:
    """Seconds as whole picoseconds, the unit of the clock. Raises `DiagnosticError` for a time that
    is not finite."""
    number = seconds * PICOSECONDS
    if not isfinite(number):
        raise error(
            "a kernel or a message takes infinitely long",
            remedy="check the figures of the machine: one is too small or too large",
        )
    return round(number)
