"""What happens in a piece, for any costs: each end is the latest of some sums of costs, from when
its inputs are there and its streams are free.

    given: when the compute stream is free, when the gather's stream is
    gather beside, product      the product ends at the later one of
                                compute + product  and  stream + gather + product

A moment is a wait inside of the piece, and a segment what runs after it without another one. What
is known of the order of what is given leaves waits out: an activation that was there before the
last computation is no reason to wait after the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagec.time.clock.shapes import Shape


class Segment(NamedTuple):
    """From a moment on, the nodes `first`, ..., `last` - 1 of a piece, one after the other."""

    moment: int
    first: int
    last: int


#: A moment that is found from another one: its number, and the segments that it waits for.
Waits = tuple[int, Sequence[Segment]]


@dataclass(frozen=True, slots=True, eq=False)
class PieceWaits:
    """What happens in pieces of a shape. Moments are numbered: those that are given are when the
    stream of computations is free, when each other stream is, and when each input is there; each of
    `moments` is the latest of some segments.

    `ends` has the end of each node, `last` the node that is the last one on each stream, that of
    computations first (-1 if there is none). `covered` are the nodes that end no later than the
    last computation. `reached` has of each moment the given ones that it comes after, as bits.
    """

    shape: Shape
    moments: Sequence[Sequence[Segment]]
    ends: Sequence[Segment]
    last: Sequence[int]
    covered: Sequence[bool]
    reached: Sequence[int]
    variants: dict[tuple[int, ...], PieceWaits] = field(
        default_factory=dict[tuple[int, ...], "PieceWaits"]
    )

    @property
    def given(self) -> int:
        """How many moments are given."""
        return len(self.reached) - len(self.moments)

    def knowing(self, earlier: tuple[int, ...]) -> PieceWaits:
        """The same without waits for what is there anyway: of each given moment, which others are
        surely no earlier, as bits."""
        found = self.variants.get(earlier)
        if found is None:
            known = self._without(earlier)
            found = self.variants[earlier] = PieceWaits(
                self.shape, known, self.ends, self.last, self.covered, self._reached(known)
            )
        return found

    def _without(self, earlier: Sequence[int]) -> list[Sequence[Segment]]:
        found: list[Sequence[Segment]] = []
        for waits in self.moments:
            left = list(waits)
            for wait in waits:
                if wait.moment >= self.given or wait.first != wait.last:
                    continue
                later = earlier[wait.moment]
                if any(self.reached[o.moment] & later for o in left if o is not wait):
                    left.remove(wait)
            found.append(left)
        return found

    def _reached(self, moments: Sequence[Sequence[Segment]]) -> list[int]:
        found = list(self.reached[: self.given])
        for waits in moments:
            found.append(_union(found[wait.moment] for wait in waits))
        return found

    def between(self, given: int, ends: Iterable[Segment]) -> list[Waits]:
        """What is found on the way from a given moment to some ends, in order."""
        bit, wanted = 1 << given, {end.moment for end in ends}
        found: list[Waits] = []
        for number in range(len(self.reached) - 1, self.given - 1, -1):
            if number in wanted and self.reached[number] & bit:
                waits = self.moments[number - self.given]
                led = [w for w in waits if self.reached[w.moment] & bit]
                wanted.update(wait.moment for wait in led)
                found.append((number, led))
        return found[::-1]


def template_of(shape: Shape) -> PieceWaits:
    """What happens in pieces of a shape, where nothing runs slower beside something else."""
    return _Making(shape).template()


class _Making:
    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._first_input = 1 + len(shape.streams)
        self._given = self._first_input + len(shape.floors)
        self._free = [Segment(number, 0, 0) for number in range(self._first_input)]
        self._last = [-1] * self._first_input
        self._moments: list[Sequence[Segment]] = []
        self._ends: list[Segment] = []

    def template(self) -> PieceWaits:
        steps = self._shape.steps
        for chain in self._shape.chains:
            if not chain.follows:
                for place in range(chain.first, chain.last):
                    self._run(place)
                continue
            begun = self._free[0]  # a call that leads a chain follows the computation before it
            if steps[chain.first].computes:
                begun = self._start(chain.first, (0,))
            for place in range(chain.first, chain.last):
                self._ends.append(self._extended(begun, chain.first, place + 1))
            self._on(0, chain.last - 1)
            for number, place in chain.used:
                self._on(number, place)
        reached = [1 << number for number in range(self._given)]
        for waits in self._moments:
            reached.append(_union(reached[wait.moment] for wait in waits))
        return PieceWaits(
            self._shape, self._moments, self._ends, self._last, self._covered(), reached
        )

    def _run(self, place: int) -> None:
        on = self._shape.steps[place].on
        self._ends.append(self._extended(self._start(place, on), place, place + 1))
        for number in on:
            self._on(number, place)

    def _on(self, stream: int, place: int) -> None:
        """Note the last node on a stream."""
        self._free[stream], self._last[stream] = self._ends[place], place

    def _covered(self) -> list[bool]:
        steps = self._shape.steps
        found = [step.computes for step in steps]
        for place in range(len(steps) - 1, -1, -1):
            if found[place]:
                for before in steps[place].inner:
                    found[before] = True
        return found

    def _start(self, place: int, on: Iterable[int]) -> Segment:
        """When a node on these streams starts."""
        step = self._shape.steps[place]
        waits = [self._free[number] for number in on]
        waits += [self._ends[i] for i in step.inner]
        waits += [Segment(self._first_input + i, 0, 0) for i in step.inputs]
        left = _latest(waits)
        return left[0] if len(left) == 1 else self._moment(left)

    def _moment(self, waits: Sequence[Segment]) -> Segment:
        self._moments.append(waits)
        return Segment(self._given + len(self._moments) - 1, 0, 0)

    def _extended(self, begun: Segment, first: int, last: int) -> Segment:
        """What ends when these nodes have run after a segment."""
        if begun.first == begun.last:
            return Segment(begun.moment, first, last)
        if begun.last != first:
            return Segment(self._moment([begun]).moment, first, last)
        return Segment(begun.moment, begun.first, last)


def _latest(waits: Sequence[Segment]) -> list[Segment]:
    """Those that may be the latest: a segment is no later than one that contains it."""
    unique = list(dict.fromkeys(waits))
    return [one for one in unique if not any(_contains(o, one) for o in unique if o is not one)]


def _contains(one: Segment, other: Segment) -> bool:
    if one.moment != other.moment:
        return False
    return other.first == other.last or (one.first <= other.first and other.last <= one.last)


def _union(bits: Iterable[int]) -> int:
    found = 0
    for each in bits:
        found |= each
    return found
