"""Shapes of pieces: nodes that are replayed together, what each waits for, and what is known of
that whatever they cost.

    product, norm, gather, product      each starts when the one before ends: a sum
    reduce (beside), product            the product waits for nothing new: the next sum
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar, cast

from stagec.ir.expr import ZERO
from stagec.program.groups import Channel, channel_of
from stagec.program.nodes import Node
from stagec.time.streams import COMPUTE, Part, Stream, part_of

T = TypeVar("T", bound=Hashable)
#: Floors of inputs that are no streams: the base, and none.
BASE, NO_FLOOR = -2, -1
_NO_CHANNEL: Channel = ("", ZERO, 0)


class ShapeNode(NamedTuple):
    """A node of a piece, and what it waits for: places in the piece, and numbers of inputs.

    `on` are the numbers of its streams: 0 is that of computations, others are one more than their
    place in the shape. `beside` says that computations after it are slower while it runs,
    `computes` that it is on the stream of computations. What a computation waits for that is done
    anyway when the one before it is done is left out."""

    node: Node
    streams: tuple[Stream, ...]
    on: tuple[int, ...]
    inner: tuple[int, ...]
    inputs: tuple[int, ...]
    beside: bool
    part: Part
    computes: bool


class Chain(NamedTuple):
    """The steps `first`, ..., `last` - 1 of a piece.

    If it `follows`, each but the first starts when the one before it ends: computations that wait
    for nothing else, and calls between them. The first is a computation that may wait for something
    else, or starts when the computation before it ends. `used` are the numbers of the other streams
    that they are on, each with its last place; `calls` are the places of what is not on the stream
    of computations, by what it counts as. Else it is one step that may wait for something else.
    """

    first: int
    last: int
    follows: bool
    used: tuple[tuple[int, int], ...]
    calls: tuple[tuple[Part, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Nodes that are replayed together, whatever they cost.

    `gates` are the inputs of the first computation. What is `late` matters only as far as it comes
    after the base: whatever waits for it starts after the base anyway. So does what waits for an
    input only once a stream is free: `floors` has the number of that stream, or `BASE`, or
    `NO_FLOOR`. `sends` are places of messages, with the channel of each. What `joins` classes is
    one node; if that is a message, `channel` is its channel. `computed` are the places of what the
    compute stream runs, each with what is equal for nodes that do the same.
    """

    steps: Sequence[ShapeNode]
    chains: Sequence[Chain]
    joins: bool
    computes: bool
    gates: tuple[int, ...]
    floors: tuple[int, ...]
    streams: tuple[Stream, ...]
    late_streams: tuple[bool, ...]
    sends: tuple[tuple[int, Channel], ...]
    channel: Channel = _NO_CHANNEL

    computed: Sequence[tuple[Hashable, int]] = ()

    @property
    def node(self) -> Node:
        """The first node."""
        return self.steps[0].node


def make_shape(
    nodes: Sequence[Node],
    streams_of: Sequence[tuple[Stream, ...]],
    inner: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
    *,
    joins: bool,
) -> Shape:
    """The shape of nodes, with the streams that each is on, and the places and the inputs that it
    waits for."""
    steps: list[ShapeNode] = []
    order = _Order(steps)
    after_base: list[bool] = []
    late_streams: dict[Stream, bool] = {}
    floors: list[set[int]] = [set() for _ in range(1 + max(chain(*inputs), default=-1))]
    for i, (node, streams) in enumerate(zip(nodes, streams_of, strict=True)):
        others = [stream for stream in streams if stream != COMPUTE]
        computes = COMPUTE in streams
        late = computes or any(after_base[j] for j in inner[i])
        late = late or any(late_streams.get(stream, False) for stream in others)
        for stream in others:
            late_streams.setdefault(stream, late)
        numbers = [[*late_streams].index(stream) for stream in others]
        floor = BASE if late else numbers[0]
        for number in inputs[i]:
            floors[number].add(floor)
        after_base.append(late)
        beside = node.is_collective and not computes and not joins
        own, given = order.add(others, inner[i], inputs[i], computes=computes)
        on = (*([0] if computes else []), *(n + 1 for n in numbers))
        waits = _shared(on), _shared(own), _shared(given)
        step = ShapeNode(node, _shared(streams), *waits, beside, part_of(node), computes)
        steps.append(step)
    first = next((step for step in steps if step.computes), None)
    sends = ((i, n) for i, n in enumerate(nodes) if n.is_message and n.kind == "send")
    return Shape(
        steps,
        _chains(steps, order),
        joins,
        first is not None,
        first.inputs if first is not None else (),
        tuple(f.pop() if len(f) == 1 else NO_FLOOR for f in floors),
        tuple(late_streams),
        tuple(late_streams.values()),
        tuple((i, _channel(node)) for i, node in sends),
        _channel(nodes[0]) if joins and nodes[0].is_message else _NO_CHANNEL,
        [(_alike(step.node), i) for i, step in enumerate(steps) if step.computes],
    )


def _shared(of: T) -> T:
    """The one of all that are equal: shapes have many tuples, and most are alike."""
    return cast("T", _first_like(of))


@lru_cache(maxsize=1 << 14)
def _first_like(of: Hashable) -> Hashable:
    return of


class _Order:
    """What is done when the computations of a piece so far are: some of its inputs, and the nodes
    on other streams up to a place.

    `follows` tells the steps that start when the one before it ends, whatever they cost; `leads`
    those that may be the first of such.
    """

    def __init__(self, steps: Sequence[ShapeNode]) -> None:
        self.follows: list[bool] = []
        self.leads: list[bool] = []
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
            self.leads.append(False)
            return tuple(inner), tuple(inputs)
        own = tuple(j for j in inner if not steps[j].computes and not self._is_done(j))
        given = tuple(number for number in inputs if number not in self._inputs)
        after_call = own == (place - 1,) == (self._call,)
        self.follows.append(free and not given and (not own or after_call))
        self.leads.append(free)
        if self.follows[place] and after_call:
            self.follows[place - 1] = self.leads[place - 1] = True
        self._computed = place
        self._inputs.update(given)
        self._done.update(dict.fromkeys(streams, place))
        for j in own:
            for stream in steps[j].streams:
                self._done[stream] = max(j, self._done.get(stream, -1))
        return own, given

    def _is_done(self, place: int) -> bool:
        return all(self._done.get(stream, -1) >= place for stream in self._steps[place].streams)


def _chains(steps: Sequence[ShapeNode], order: _Order) -> Sequence[Chain]:
    follows, leads = order.follows, order.leads
    found: list[Chain] = []
    first = 0
    for last in range(1, len(steps) + 1):
        if last < len(steps) and leads[first] and follows[last]:
            continue
        inside = range(first, last)
        used = {number: i for i in inside for number in steps[i].on if number}
        calls: dict[Part, list[int]] = {}
        for i in inside:
            if not steps[i].computes:
                calls.setdefault(steps[i].part, []).append(i)
        by_part = tuple((part, tuple(places)) for part, places in calls.items())
        found.append(Chain(first, last, leads[first], tuple(used.items()), by_part))
        first = last
    return found


def _alike(node: Node) -> Hashable:
    return node if node.op is None else (node.op, node.index)


def _channel(node: Node) -> Channel:
    """The channel of a message."""
    if node.op is None:
        raise ValueError(f"{node.name} is a run of no operation")
    return channel_of(node.op)
