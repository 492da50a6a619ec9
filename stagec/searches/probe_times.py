"""The times of a microbatch in a replayed probe: where its layers begin and end in forward and in
backward, what they wait for, and how long they occupy streams beyond their ends.

A time counts only if the causes of nodes prove it: the chain of causes of the last computation of a
chunk leads back, through nodes of the chunk, to its first computation. No other work before the
chunk can then make it shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.program.groups import GroupAxes
from stagec.searches.explore.pipelined import ActionTimes, Pair, PhaseTimes
from stagec.time.clock.graph import OnStreams
from stagec.time.clock.times import ClassTimes
from stagec.time.streams import PICOSECONDS, Stream

#: Numbers of phases, see `Pair`.
_FORWARD, _BACKWARD = 0, 1


class NodeRun(NamedTuple):
    """A node that the clock replayed, as its number `at`: the node that it waited for (or -1), its
    phase (-1 for the optimizer), its layer (or -1), and its start and end in picoseconds."""

    at: int
    cause: int
    step: OnStreams
    phase: int
    layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The repeated layers as one chunk that runs forward or backward: the start of its first
    computation and the end of its last one, and whether causes prove the time between, in
    picoseconds. For each stream, `enters` is the time after the first computation at which it must
    be free, `leaves` the time after the last one for which it stays in use."""

    first: int
    end: int
    proven: bool
    enters: Mapping[Stream, int] = field(default_factory=dict[Stream, int])
    leaves: Mapping[Stream, int] = field(default_factory=dict[Stream, int])

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
        return [_gap(one, other) for one, other in product(self.chunks, self.chunks)]


def _gap(one: Chunk, other: Chunk) -> int:
    both = one.leaves.keys() & other.enters.keys()
    return max([0, *(one.leaves[s] - other.enters[s] for s in both)])


def span_of(ran: Sequence[NodeRun], before: int, many: int) -> ClassSpan | None:
    """The span of a class of a model with `many` repeated layers after `before` others; None if its
    nodes do not have as many layers."""
    computed = [r for r in ran if r.step.computes and r.step.node.is_computation]
    steps = [r for r in computed if r.phase >= 0]
    forward = _visits([r for r in steps if r.phase == _FORWARD])[before : before + many]
    backward = _visits([r for r in steps if r.phase == _BACKWARD])[: -before or None][-many:]
    if len(forward) < many or len(backward) < many:
        return None
    one, other = _chunk(ran, forward, _FORWARD), _chunk(ran, backward, _BACKWARD)
    turned = max(r.end for r in steps if r.phase == _FORWARD)
    ended = max(r.end for r in steps)
    first = one.first - steps[0].start, ended - other.end
    last = turned - one.end, other.first - turned
    around = (max(0, first[0]), max(0, last[0])), (max(0, first[1]), max(0, last[1]))
    return ClassSpan(many, (one, other), around)


def ran_of(each: ClassTimes) -> list[NodeRun]:
    """The nodes of a class in the order of issue."""
    first, causes = each.nodes.first, each.causes.tolist()
    ran: list[NodeRun] = []
    for at, (cause, (placed, start, end)) in enumerate(
        zip(causes, each.rows(), strict=True), first
    ):
        node = placed.node
        phase = -1 if node.phase == "optimizer" else int(node.phase != "forward")
        ran.append(NodeRun(at, cause, placed, phase, node.layer, start, end))
    return ran


def _visits(computed: Sequence[NodeRun]) -> list[list[NodeRun]]:
    """The computations of each layer, layer by layer."""
    visits: list[list[NodeRun]] = []
    layer = -1
    for each in computed:
        if each.layer >= 0:
            if each.layer != layer:
                visits.append([])
            visits[-1].append(each)
        layer = each.layer
    return visits


def _chunk(ran: Sequence[NodeRun], visits: Sequence[Sequence[NodeRun]], phase: int) -> Chunk:
    first, last = visits[0][0], visits[-1][-1]
    inside = {r.at: r for r in ran if r.phase == phase and r.layer >= 0}
    chain = list(_chain(last, inside))
    led = {r.at for r in chain}
    if first.at not in led:
        return Chunk(first.start, last.end, proven=False)
    enters: dict[Stream, int] = {}
    for each in chain:
        stream = each.step.streams[-1]
        if not each.step.node.is_computation and (each.start >= first.end or _of_data(stream)):
            enters[stream] = each.start - first.start
    leaves = {
        stream: each.end - last.end
        for stream, each in _after(ran, last).items()
        if any(r.at in led for r in _chain(each, inside))
    }
    return Chunk(first.start, last.end, True, enters, leaves)


def _chain(last: NodeRun, inside: Mapping[int, NodeRun]) -> Iterator[NodeRun]:
    """A node of a chunk, the node that it waited for, and so on, up to the first outside of the
    chunk."""
    at = last.at
    while (ran := inside.get(at)) is not None:
        yield ran
        at = ran.cause


def _after(ran: Sequence[NodeRun], last: NodeRun) -> dict[Stream, NodeRun]:
    """The last node of the last layer on each stream except the compute stream, if it is issued
    before the next computation."""
    latest: dict[Stream, NodeRun] = {}
    begun = False
    for each in ran:
        computes = each.step.node.is_computation
        if begun and computes:
            break
        begun = begun or each.at == last.at
        if not computes and each.layer == last.layer and each.phase == last.phase:
            latest[each.step.streams[-1]] = each
    return {stream: each for stream, each in latest.items() if each.end > last.end}


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
    gaps = [min(column) / PICOSECONDS for column in zip(*(s.gaps for s in few), strict=True)]
    return ActionTimes((forward, backward), (Pair(*gaps[:2]), Pair(*gaps[2:])))


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


def turn_of(ran: Sequence[NodeRun]) -> int:
    """Picoseconds from one microbatch to the next, where each ends with a reduction over
    data-parallel ranks (a reduce_scatter, as in ZeRO-2 and 3): from the first use of its stream in
    the chain of causes to the end of the reduction. The next microbatch cannot use the stream
    before that end. 0 without such a reduction."""
    inside = {r.at: r for r in ran if r.phase >= 0}
    last: dict[Stream, NodeRun] = {}
    for each in inside.values():
        stream = each.step.streams[-1]
        if each.step.node.kind == "reduce_scatter" and _of_data(stream):
            last[stream] = each
    begun = {
        stream: min(r.start for r in _chain(each, inside) if r.step.streams[-1] == stream)
        for stream, each in last.items()
    }
    return max((each.end - begun[stream] for stream, each in last.items()), default=0)


def tail_of(each: ClassTimes) -> float:
    """Seconds from the first node of the optimizer to the end of the step; 0 unless the optimizer
    follows all other computations."""
    computed = [r for r in ran_of(each) if r.step.node.is_computation]
    update = min((r.start for r in computed if r.phase < 0), default=each.end)
    ended = max((r.end for r in computed if r.phase >= 0), default=0)
    return (each.end - update) / PICOSECONDS if update >= ended else 0.0
