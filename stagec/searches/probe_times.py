"""The times of a microbatch in a replayed probe: where its layers begin and end in forward and in
backward, what they wait for, and how long they occupy streams beyond their ends.

A time counts only if the causes of nodes prove it: the chain of causes of the last computation of a
chunk leads back, through nodes of the chunk, to its first computation. No other work before the
chunk can then make it shorter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from weakref import WeakKeyDictionary

import numpy as np

from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.program.groups import GroupAxes
from stagec.searches.explore.pipelined import ActionTimes, Pair, PhaseTimes
from stagec.support.memo import memo_method
from stagec.time.clock.graph import ClassNodes, Indices
from stagec.time.clock.times import ClassTimes
from stagec.time.streams import COMPUTE, PICOSECONDS, Stream

#: Numbers of phases, see `Pair`.
PHASES = _FORWARD, _BACKWARD = 0, 1


class IssuedNodes:
    """The nodes of a class by their places in the order of issue, without their times: for each its
    phase (-1 for the optimizer), its layer (or -1), and the last of its streams; `computations`
    are the places of the computations."""

    def __init__(self, nodes: ClassNodes) -> None:
        kinds, placed = nodes.prototype, [each.node for each in nodes.prototypes]
        phases = [-1 if n.phase == "optimizer" else int(n.phase != "forward") for n in placed]
        self.phase = np.array(phases, dtype=np.int8)[kinds]
        self.layer = np.array([n.layer for n in placed], dtype=np.int32)[kinds]
        computes = nodes.where(lambda p: p.streams[-1] == COMPUTE)
        self.computations: Indices = np.flatnonzero(computes).astype(np.int32)
        self._beside = nodes.where(lambda p: not p.computes)
        streams: list[Stream] = [each.streams[-1] for each in nodes.prototypes]
        self.streams: list[Stream] = [streams[kind] for kind in kinds.tolist()]
        shares = nodes.where(lambda p: p.node.kind == "reduce_scatter" and _of_data(p.streams[-1]))
        #: Of each stream of data-parallel ranks its last reduction of a microbatch.
        self.last_reductions: dict[Stream, int] = {
            self.streams[i]: i for i in np.flatnonzero(shares & (self.phase >= 0)).tolist()
        }

    @memo_method
    def of_layers(self, phase: int) -> bytes:
        """1 for those of a layer in a phase, 0 for others."""
        return bytes((self.phase == phase) & (self.layer >= 0))

    @cached_property
    def of_microbatches(self) -> bytes:
        """0 for those of the optimizer, 1 for others."""
        return bytes(self.phase >= 0)

    @cached_property
    def communication(self) -> Mapping[Stream, Indices]:
        """Those of layers that the stream of computations does not run, by stream."""
        beside = self._beside & (self.layer >= 0) & (self.phase >= 0)
        places: dict[Stream, list[int]] = {}
        for i in np.flatnonzero(beside).tolist():
            places.setdefault(self.streams[i], []).append(i)
        return {stream: np.array(of, dtype=np.int32) for stream, of in places.items()}

    @memo_method
    def of_phase(self, phase: int) -> Indices:
        """The computations of a phase."""
        own: Indices = self.computations[self.phase[self.computations] == phase]
        return own

    @memo_method
    def visits(self, phase: int) -> Sequence[tuple[int, int]]:
        """The first and the last computation of each layer in a phase, layer by layer."""
        steps = self.of_phase(phase)
        layer = self.layer[steps]
        inside = layer >= 0
        first = steps[inside & (layer != np.append([-1], layer[:-1]))]
        last = steps[inside & (layer != np.append(layer[1:], [-1]))]
        return list(zip(first.tolist(), last.tolist(), strict=True))

    @memo_method
    def after(self, last: int) -> Mapping[Stream, int]:
        """The last nodes of the layer of a node on each stream beside the computations, of those
        that are issued before the next computation."""
        end = next((i for i in self.computations.tolist() if i > last), len(self.streams))
        alike = (self.layer == self.layer[last]) & (self.phase == self.phase[last])
        beside = (i for i in np.flatnonzero(alike[:end]).tolist() if self.streams[i] != COMPUTE)
        return {self.streams[i]: i for i in beside}


#: The nodes of classes that live.
_issued: WeakKeyDictionary[ClassNodes, IssuedNodes] = WeakKeyDictionary()


class Ran:
    """What ran of a class, in picoseconds: when its nodes start and end, and the place of the node
    of the class that each waited for; of others it is no place."""

    def __init__(self, each: ClassTimes) -> None:
        nodes = _issued.get(each.nodes)
        if nodes is None:
            nodes = _issued[each.nodes] = IssuedNodes(each.nodes)
        self.nodes, self.ends = nodes, each.ends
        self.starts = self.ends - each.spans
        self.start: list[int] = self.starts.tolist()
        self.end: list[int] = self.ends.tolist()
        self._causes: list[int] = (each.causes - each.nodes.first).tolist()

    def chain(self, last: int, inside: bytes) -> Iterator[int]:
        """A node, what it waited for, and so on, as far as that is `inside`."""
        causes, count, at = self._causes, len(inside), last
        while 0 <= at < count and inside[at]:
            yield at
            at = causes[at]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The repeated layers as one chunk that runs forward or backward: the start of its first
    computation and the end of its last one, and whether causes prove the time between, in
    picoseconds. For each stream, `enters` is the time after the first computation at which it must
    be free, `leaves` the time after the last one for which it stays in use; `lead` is the time
    before the first computation at which it must be free, as a negative number, `last` the time
    from the end of the last one to that of the stream, which may be negative."""

    first: int
    end: int
    proven: bool
    enters: Mapping[Stream, int] = field(default_factory=dict[Stream, int])
    leaves: Mapping[Stream, int] = field(default_factory=dict[Stream, int])
    lead: Mapping[Stream, int] = field(default_factory=dict[Stream, int])
    last: Mapping[Stream, int] = field(default_factory=dict[Stream, int])

    @property
    def length(self) -> int:
        """Picoseconds from the first computation to the end of the last one."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class ClassSpan:
    """A class in a step of one stage, one microbatch and `layers` repeated layers: the chunks of
    forward and of backward, and by phase the picoseconds `around` the chunk, that is before and
    after the repeated layers of the model."""

    layers: int
    chunks: tuple[Chunk, Chunk]
    around: tuple[tuple[int, int], tuple[int, int]]

    @property
    def gaps(self) -> list[int]:
        """The waits between two actions, by the phases of both: forward and forward, forward and
        backward, backward and forward, backward and backward."""
        every = product(self.chunks, self.chunks)
        return [_gap(one.leaves, other.enters) for one, other in every]

    @property
    def inner(self) -> list[int]:
        """The waits between two actions, the second of which also communicates before its first
        computation."""
        every = product(self.chunks, self.chunks)
        leads = [_gap(one.last, other.lead) for one, other in every]
        return [max(waits) for waits in zip(self.gaps, leads, strict=True)]


def _gap(one: Mapping[Stream, int], other: Mapping[Stream, int]) -> int:
    return max([0, *(one[s] - other[s] for s in one.keys() & other.keys())])


def span_of(ran: Ran, before: int, many: int) -> ClassSpan | None:
    """The span of a class of a model with `many` repeated layers after `before` others; None if its
    nodes do not have as many layers."""
    nodes, end = ran.nodes, ran.ends
    forward = nodes.visits(_FORWARD)[before : before + many]
    backward = nodes.visits(_BACKWARD)[: -before or None][-many:]
    if len(forward) < many or len(backward) < many:
        return None
    one, other = _chunk(ran, forward, _FORWARD), _chunk(ran, backward, _BACKWARD)
    turned = int(end[nodes.of_phase(_FORWARD)].max())
    ended = max(turned, int(end[nodes.of_phase(_BACKWARD)].max()))
    begins = min(int(nodes.of_phase(phase)[0]) for phase in PHASES)
    first = one.first - ran.start[begins], ended - other.end
    last = turned - one.end, other.first - turned
    around = (max(0, first[0]), max(0, last[0])), (max(0, first[1]), max(0, last[1]))
    return ClassSpan(many, (one, other), around)


def _chunk(ran: Ran, visits: Sequence[tuple[int, int]], phase: int) -> Chunk:
    nodes, start, end = ran.nodes, ran.start, ran.end
    (first, _), (_, last) = visits[0], visits[-1]
    inside = nodes.of_layers(phase)
    chain = list(ran.chain(last, inside))
    led = {*chain}
    if first not in led:
        return Chunk(start[first], end[last], proven=False)
    enters: dict[Stream, int] = {}
    for at in chain:
        stream = nodes.streams[at]
        if stream != COMPUTE and (start[at] >= end[first] or _of_data(stream)):
            enters[stream] = start[at] - start[first]
    lead: dict[Stream, int] = {}
    for at in islice(ran.chain(first, inside), 1, None):
        stream = nodes.streams[at]
        if stream == COMPUTE or _of_data(stream):  # parameters may be gathered earlier
            break
        lead[stream] = start[at] - start[first]
    used = {
        stream: end[at] - end[last]
        for stream, at in nodes.after(last).items()
        if not led.isdisjoint(ran.chain(at, inside))
    }
    leaves = {stream: time for stream, time in used.items() if time > 0}
    return Chunk(start[first], end[last], True, enters, leaves, lead, used)


def _of_data(stream: Stream) -> bool:
    """Whether a stream is that of a group of data-parallel ranks."""
    match stream:
        case ("group", GroupAxes() as group):
            return not {*DATA_AXES}.isdisjoint(group.axes)
        case _:
            return False


def action_times(few: Sequence[ClassSpan], many: Sequence[ClassSpan], more: int) -> ActionTimes:
    """The times of the actions of a pipeline, the least of all classes, from probes of few and of
    many layers; the second has `more` layers more."""
    forward, backward = (_phase(few, many, more, phase) for phase in (_FORWARD, _BACKWARD))
    both = [s.gaps for s in few], [s.inner for s in few]
    least = [[min(column) / PICOSECONDS for column in zip(*rows, strict=True)] for rows in both]
    gaps, inner = ((Pair(*row[:2]), Pair(*row[2:])) for row in least)
    return ActionTimes((forward, backward), gaps, inner)


def _phase(
    few: Sequence[ClassSpan], many: Sequence[ClassSpan], more: int, phase: int
) -> PhaseTimes | None:
    if not all(span.chunks[phase].proven for span in (*few, *many)):
        return None
    short, long = (min(s.chunks[phase].length for s in spans) for spans in (few, many))
    layer = max(0.0, (long - short) / more)
    border = max(0.0, *(layer * s.layers - s.chunks[phase].length for s in few))
    around = (min(s.around[phase][i] for s in (*few, *many)) for i in (0, 1))
    return PhaseTimes(*(time / PICOSECONDS for time in (layer, border, *around)))


def turn_of(ran: Ran) -> int:
    """Picoseconds from one microbatch to the next, where each ends with a reduction over
    data-parallel ranks (a reduce_scatter, as in ZeRO-2 and 3): from the first use of its stream in
    the chain of causes to the end of the reduction. The next microbatch cannot use the stream
    before that end. 0 without such a reduction."""
    nodes, start = ran.nodes, ran.start
    turns = [0]
    for stream, last in nodes.last_reductions.items():
        chain = ran.chain(last, nodes.of_microbatches)
        turns.append(ran.end[last] - min(start[i] for i in chain if nodes.streams[i] == stream))
    return max(turns)


def tail_of(each: ClassTimes) -> float:
    """Seconds from the first node of the optimizer to the end of the step; 0 unless the optimizer
    follows all other computations."""
    ran = Ran(each)
    computed = ran.nodes.computations
    updates = ran.nodes.phase[computed] < 0
    update = min(ran.starts[computed[updates]].tolist(), default=each.end)
    ended = max(ran.ends[computed[~updates]].tolist(), default=0)
    return (each.end - update) / PICOSECONDS if update >= ended else 0.0
