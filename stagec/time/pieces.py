"""Pieces of programs: nodes that need nothing of other classes in their midst, replayed once for
every state in which they are met.

The state is what came before, relative to when the first computation can start. The same relative
times give the same relative ends, so what was found once is looked up: a step of thousands of
actions has a few dozen states.

    at 900: product 900..940, all_gather 940..950, product 950..990      replayed, and kept
    at 990: product 990..1030, ...                                       looked up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from stagec.ir.expr import ZERO
from stagec.program.groups import Channel, channel_of
from stagec.program.nodes import Node
from stagec.time.streams import (
    COMPUTE,
    INTERFERENCE,
    Cost,
    Part,
    Stream,
    merged,
    part_of,
    stretched,
)

Intervals = tuple[tuple[int, int], ...]


class Cause(NamedTuple):
    """Why a node started when it did: the `place` of a node in the piece, the number of an `input`,
    or else what was on a stream before."""

    place: int = -1
    input: int = -1
    stream: Stream = COMPUTE


class State(NamedTuple):
    """How a piece is met, relative to its base: when its inputs are there, when its streams are
    free, and the collectives that still run beside computations."""

    inputs: tuple[int, ...]
    streams: tuple[int, ...]
    busy: Intervals


#: Floors of inputs that are no streams: the base, and none.
BASE, NO_FLOOR = -2, -1
_NO_CHANNEL: Channel = ("", ZERO, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What happens in a piece that is met in a state, relative to its base.

    `compute` is the end of its last computation. Of the streams that it used, `streams` has the
    end and the place of the last node. `busy` is what still runs beside later computations. `parts`
    is what the compute stream spent beside what its nodes take: on waits for nodes of the piece,
    and on interference. `waits` is how long it waited until inputs came, or until what was before
    the piece on a stream was done; `before` are the streams that such nodes were on.
    """

    compute: int
    starts: Sequence[int]
    ends: Sequence[int]
    streams: Mapping[Stream, tuple[int, int]]
    busy: Intervals
    parts: Mapping[Part, int]
    waits: Sequence[tuple[Cause, int]]
    causes: Sequence[Cause]
    before: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A node of a piece, and what it waits for: places in the piece, and numbers of inputs.

    `beside` says that computations after it are slower while it runs, `computes` that it is on the
    stream of computations. What a computation waits for that is done anyway when the one before it
    is done is left out."""

    node: Node
    streams: tuple[Stream, ...]
    inner: tuple[int, ...]
    inputs: tuple[int, ...]
    beside: bool
    part: Part
    computes: bool


class Chain(NamedTuple):
    """The steps `first`, ..., `last` - 1 of a piece.

    If it `follows`, each starts when the one before it ends: computations that wait for nothing
    else, and calls between them. `used` are the other streams that they are on, each with its last
    place; `calls` are the places of what is not on the stream of computations. Else it is one step
    that may wait for something else.
    """

    first: int
    last: int
    follows: bool
    used: tuple[tuple[Stream, int], ...]
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Nodes that are replayed together, whatever they cost.

    `gates` are the inputs of the first computation. What is `late` matters only as far as it comes
    after the base: whatever waits for it starts after the base anyway. So does what waits for an
    input only once a stream is free: `floors` has the number of that stream, or `BASE`, or
    `NO_FLOOR`. `sends` are places of messages, with the channel of each. What `joins` classes is
    one node; if that is a message, `channel` is its channel.
    """

    steps: Sequence[Step]
    chains: Sequence[Chain]
    joins: bool
    computes: bool
    gates: tuple[int, ...]
    floors: tuple[int, ...]
    streams: tuple[Stream, ...]
    late_streams: tuple[bool, ...]
    sends: tuple[tuple[int, Channel], ...]
    channel: Channel = _NO_CHANNEL

    @property
    def node(self) -> Node:
        """The first node."""
        return self.steps[0].node


class Piece:
    """A shape with costs, and what is known of it."""

    def __init__(self, shape: Shape, costs: Sequence[Cost]) -> None:
        self.shape, self.costs = shape, costs
        self.spans = [cost.launch + cost.time for cost in costs]
        self._known: dict[State, Entry] = {}

    def entry(self, state: State, slowdown: int) -> Entry:
        """What happens in a state, found at the first time."""
        found = self._known.get(state)
        if found is None:
            found = self._known[state] = _Run(self, state, slowdown).entry()
        return found


def make_shape(
    nodes: Sequence[Node],
    on: Sequence[tuple[Stream, ...]],
    inner: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
    *,
    joins: bool,
) -> Shape:
    """The shape of nodes, with the streams that each is on, and the places and the inputs that it
    waits for."""
    steps: list[Step] = []
    order = _Order(steps)
    after_base: list[bool] = []
    late_streams: dict[Stream, bool] = {}
    floors: list[set[int]] = [set() for _ in range(1 + max(chain(*inputs), default=-1))]
    for i, (node, streams) in enumerate(zip(nodes, on, strict=True)):
        others = [stream for stream in streams if stream != COMPUTE]
        computes = COMPUTE in streams
        late = computes or any(after_base[j] for j in inner[i])
        late = late or any(late_streams.get(stream, False) for stream in others)
        for stream in others:
            late_streams.setdefault(stream, late)
        floor = BASE if late else [*late_streams].index(others[0])
        for number in inputs[i]:
            floors[number].add(floor)
        after_base.append(late)
        beside = node.is_collective and not computes and not joins
        own, given = order.add(others, inner[i], inputs[i], computes=computes)
        steps.append(Step(node, streams, own, given, beside, part_of(node), computes))
    first = next((step for step in steps if step.computes), None)
    sends = ((i, n) for i, n in enumerate(nodes) if n.is_message and n.kind == "send")
    return Shape(
        steps,
        _chains(steps, order.follows),
        joins,
        first is not None,
        first.inputs if first is not None else (),
        tuple(f.pop() if len(f) == 1 else NO_FLOOR for f in floors),
        tuple(late_streams),
        tuple(late_streams.values()),
        tuple((i, _channel(node)) for i, node in sends),
        _channel(nodes[0]) if joins and nodes[0].is_message else _NO_CHANNEL,
    )


class _Order:
    """What is done when the computations of a piece so far are: some of its inputs, and the nodes
    on other streams up to a place.

    `follows` tells the steps that start when the one before it ends, whatever they cost.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.follows: list[bool] = []
        self._steps, self._computed, self._call = steps, -1, -1
        self._inputs: set[int] = set()
        self._done: dict[Stream, int] = {}
        self._last: dict[Stream, int] = {}

    def add(
        self,
        streams: Sequence[Stream],
        inner: Sequence[int],
        inputs: Sequence[int],
        *,
        computes: bool,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The next step, on these streams other than that of computations: what it really waits
        for."""
        place, steps = len(self.follows), self._steps
        free = all(self._done.get(s, -1) == self._last.get(s, -2) for s in streams)
        self._last.update(dict.fromkeys(streams, place))
        if not computes:
            late = all(steps[j].computes or self._is_done(j) for j in inner)
            if free and late and not inputs and self._computed in inner:
                self._call = place  # it starts when the computation before it ends
            self.follows.append(False)
            return tuple(inner), tuple(inputs)
        own = tuple(j for j in inner if not steps[j].computes and not self._is_done(j))
        given = tuple(number for number in inputs if number not in self._inputs)
        after_call = own == (place - 1,) == (self._call,)
        self.follows.append(free and not given and (not own or after_call))
        if self.follows[place] and after_call:
            self.follows[place - 1] = True
        self._computed = place
        self._inputs.update(given)
        self._done.update(dict.fromkeys(streams, place))
        for j in own:
            for stream in steps[j].streams:
                self._done[stream] = max(j, self._done.get(stream, -1))
        return own, given

    def _is_done(self, place: int) -> bool:
        return all(self._done.get(stream, -1) >= place for stream in self._steps[place].streams)


def _chains(steps: Sequence[Step], follows: Sequence[bool]) -> Sequence[Chain]:
    found: list[Chain] = []
    first = 0
    for last in range(1, len(steps) + 1):
        if last < len(steps) and follows[first] and follows[last]:
            continue
        inside = range(first, last)
        used = {s: i for i in inside for s in steps[i].streams if s != COMPUTE}
        calls = tuple(i for i in inside if not steps[i].computes)
        found.append(Chain(first, last, follows[first], tuple(used.items()), calls))
        first = last
    return found


def _channel(node: Node) -> Channel:
    """The channel of a message."""
    if node.op is None:
        raise ValueError(f"{node.name} is a run of no operation")
    return channel_of(node.op)


class _Run:
    """Runs a piece node by node."""

    def __init__(self, piece: Piece, state: State, slowdown: int) -> None:
        self._piece, self._state, self._slowdown = piece, state, slowdown
        self._free: dict[Stream, int] = dict(zip(piece.shape.streams, state.streams, strict=True))
        self._free[COMPUTE] = 0
        self._last: dict[Stream, int] = {}
        self._busy = list(state.busy)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._causes: list[Cause] = []
        self._parts: Counter[Part] = Counter()
        self._before: dict[Stream, None] = {}
        self._waits: list[tuple[Cause, int]] = []

    def entry(self) -> Entry:
        """What happened."""
        starts, ends, causes = self._starts, self._ends, self._causes
        shape, spans = self._piece.shape, self._piece.spans
        now, before = 0, Cause()  # the end of the last computation, and which one that was
        for first, last, follows, used, calls in shape.chains:
            if follows and not self._busy:
                times = [*accumulate(spans[first:last], initial=now)]
                now = times[-1]
                starts += times[:-1]
                ends += times[1:]
                causes.append(before)
                causes += [_cause_at(place) for place in range(first, last - 1)]
                before = _cause_at(last - 1)
                for stream, place in used:
                    self._free[stream], self._last[stream] = ends[place], place
                for place in calls:
                    self._spend(shape.steps[place].part, spans[place])
                continue
            for place in range(first, last):
                step = shape.steps[place]
                self._free[COMPUTE] = now
                self._run(place, step, self._piece.costs[place], before)
                if step.computes:
                    now, before = ends[place], _cause_at(place)
        self._free[COMPUTE] = now
        return self._entry()

    def _entry(self) -> Entry:
        """What happened, once all nodes ran."""
        compute = self._free[COMPUTE]
        left = tuple((max(first, compute), end) for first, end in self._busy if end > compute)
        used = {stream: (self._free[stream], place) for stream, place in self._last.items()}
        used.pop(COMPUTE, None)
        parts = {part: time for part, time in self._parts.items() if time}
        return Entry(
            compute,
            self._starts,
            self._ends,
            used,
            left,
            parts,
            self._waits,
            self._causes,
            tuple(self._before),
        )

    def _run(self, place: int, step: Step, cost: Cost, before: Cause) -> None:
        """Run a node: it starts when its streams are free and what it waits for is there."""
        start, cause = self._start(step, before)
        if cause.place < 0 and cause.input < 0 and cause.stream != COMPUTE:
            self._before[cause.stream] = None
        begun = start + cost.launch
        end = begun + cost.time
        if self._busy and step.node.is_computation:
            slowed = stretched(begun, cost.time, self._busy, self._slowdown)
            self._spend(INTERFERENCE, slowed - end)
            end = slowed
        if step.computes:
            if start > self._free[COMPUTE]:
                self._waited(cause, start)
            if self._busy and self._busy[-1][1] <= end:
                self._busy.clear()
        if step.beside and self._slowdown:
            self._busy = merged([*self._busy, (start, end)])
        for stream in step.streams:
            self._free[stream], self._last[stream] = end, place
        self._starts.append(start)
        self._ends.append(end)
        self._causes.append(cause)

    def _start(self, step: Step, before: Cause) -> tuple[int, Cause]:
        """When a node starts and why; `before` is the last computation."""
        start, cause = -_FOREVER, Cause()
        for stream in step.streams:
            if self._free[stream] > start:
                start = self._free[stream]
                if stream == COMPUTE:
                    cause = before
                    continue
                known = self._last.get(stream)
                cause = Cause(stream=stream) if known is None else _cause_at(known)
        for i in step.inner:
            if self._ends[i] > start:
                start, cause = self._ends[i], _cause_at(i)
        for i in step.inputs:
            if self._state.inputs[i] > start:
                start, cause = self._state.inputs[i], Cause(input=i)
        return start, cause

    def _waited(self, cause: Cause, until: int) -> None:
        """Account for the wait of the compute stream: for what ran then, and for what that had
        waited for before."""
        since = self._free[COMPUTE]
        while until > since:
            if cause.place < 0:
                self._waits.append((cause, until - since))
                return
            waiting, start = self._piece.shape.steps[cause.place], self._starts[cause.place]
            self._spend(waiting.part, until - max(start, since))
            until, cause = start, self._causes[cause.place]

    def _spend(self, part: Part, time: int) -> None:
        self._parts[part] += time


_FOREVER = 1 << 62
_cause_at = lru_cache(maxsize=1 << 16)(Cause)
