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
from itertools import accumulate
from typing import NamedTuple

from stagec.time.clock.shapes import Shape, ShapeNode
from stagec.time.streams import COMPUTE, INTERFERENCE, Cost, Part, Stream, merged, stretched

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


#: The same without names, which is made in half of the time.
AnyState = tuple[tuple[int, ...], tuple[int, ...], Intervals]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What happens in a piece that is met in a state, relative to its base.

    `compute` is the end of its last computation. Of the streams of the shape, `streams` has the
    end and the place of the last node. `busy` is what still runs beside later computations. `parts`
    is what the compute stream spent beside what its nodes take: on waits for nodes of the piece,
    and on interference. `waits` is how long it waited until inputs came, or until what was before
    the piece on a stream was done; `before` are the streams that such nodes were on.
    """

    compute: int
    starts: Sequence[int]
    ends: Sequence[int]
    streams: Sequence[tuple[int, int]]
    busy: Intervals
    parts: Mapping[Part, int]
    waits: Sequence[tuple[Cause, int]]
    causes: Sequence[Cause]
    before: tuple[Stream, ...]


class Piece:
    """A shape with costs, and what is known of it."""

    def __init__(self, shape: Shape, costs: Sequence[Cost]) -> None:
        self.shape, self.costs = shape, costs
        self.spans = [cost.launch + cost.time for cost in costs]
        self._known: dict[AnyState, Entry] = {}

    @property
    def met(self) -> list[tuple[State, Entry]]:
        """The states in which it was met, and what happened."""
        return [(State(*state), entry) for state, entry in self._known.items()]

    def entry(self, state: AnyState, slowdown: int) -> Entry:
        """What happens in a state, found at the first time."""
        found = self._known.get(state)
        if found is None:
            met = State(*state)
            found = self._known[met] = _Run(self, met, slowdown).entry()
        return found


class _Run:
    """Runs a piece node by node, and what is a chain at once. Streams are numbered as in
    `ShapeNode`."""

    def __init__(self, piece: Piece, state: State, slowdown: int) -> None:
        self._piece, self._state, self._slowdown = piece, state, slowdown
        self._free = [0, *state.streams]
        self._last = [-1] * len(self._free)
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
        free, last_on = self._free, self._last
        shape, spans = self._piece.shape, self._piece.spans
        steps, at = shape.steps, _places(len(shape.steps))
        before = Cause()  # the last computation
        for first, last, follows, used, calls in shape.chains:
            if follows and not self._busy:
                start, cause = free[0], before
                if steps[first].inner or steps[first].inputs:
                    start, cause = self._start(steps[first], before)
                    if start > free[0]:
                        self._waited(cause, start)
                times = [*accumulate(spans[first:last], initial=start)]
                free[0] = times[-1]
                starts += times[:-1]
                ends += times[1:]
                causes.append(cause)
                causes += at[first : last - 1]
                before = at[last - 1]
                for number, place in used:
                    free[number], last_on[number] = ends[place], place
                for part, places in calls:
                    self._parts[part] += sum([spans[place] for place in places])
                continue
            for place in range(first, last):
                self._run(place, steps[place], before)
                if steps[place].computes:
                    before = at[place]
        return self._entry()

    def _entry(self) -> Entry:
        """What happened, once all nodes ran."""
        compute = self._free[0]
        left = tuple((max(first, compute), end) for first, end in self._busy if end > compute)
        used = [*zip(self._free[1:], self._last[1:], strict=True)]
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

    def _run(self, place: int, step: ShapeNode, before: Cause) -> None:
        """Run a node; `before` is the last computation."""
        free = self._free
        start, cause = self._start(step, before)
        end = start + self._piece.spans[place]
        if self._busy and step.node.is_computation:
            end = self._slowed(place, start, end)
        if step.computes and start > free[0]:
            self._waited(cause, start)
        if self._slowdown:
            self._run_beside(step, start, end)
        for number in step.on:
            free[number], self._last[number] = end, place
        self._starts.append(start)
        self._ends.append(end)
        self._causes.append(cause)

    def _start(self, step: ShapeNode, before: Cause) -> tuple[int, Cause]:
        """When a node starts, and why: its streams are free and what it waits for is there."""
        free, ends, inputs = self._free, self._ends, self._state.inputs
        start, stream, inner, given = -_FOREVER, 0, -1, -1
        for number in step.on:
            if free[number] > start:
                start, stream = free[number], number
        for i in step.inner:
            if ends[i] > start:
                start, inner = ends[i], i
        for i in step.inputs:
            if inputs[i] > start:
                start, given = inputs[i], i
        if given >= 0:
            return start, Cause(input=given)
        if inner < 0 and not stream:
            return start, before
        place = inner if inner >= 0 else self._last[stream]
        if place >= 0:
            return start, _places(place + 1)[place]
        cause = Cause(stream=self._piece.shape.streams[stream - 1])
        self._before[cause.stream] = None
        return start, cause

    def _slowed(self, place: int, start: int, end: int) -> int:
        """When a computation ends beside which collectives run."""
        cost = self._piece.costs[place]
        slowed = stretched(start + cost.launch, cost.time, self._busy, self._slowdown)
        self._parts[INTERFERENCE] += slowed - end
        return slowed

    def _run_beside(self, step: ShapeNode, start: int, end: int) -> None:
        """Note until when computations are slower after a node."""
        if step.computes and self._busy and self._busy[-1][1] <= end:
            self._busy.clear()
        if step.beside:
            self._busy = merged([*self._busy, (start, end)])

    def _waited(self, cause: Cause, until: int) -> None:
        """Account for the wait of the compute stream: for what ran then, and for what that had
        waited for before."""
        since = self._free[0]
        while until > since:
            if cause.place < 0:
                self._waits.append((cause, until - since))
                return
            waiting, start = self._piece.shape.steps[cause.place], self._starts[cause.place]
            self._parts[waiting.part] += until - max(start, since)
            until, cause = start, self._causes[cause.place]


_FOREVER = 1 << 62
_known_places: list[Cause] = []


def _places(count: int) -> list[Cause]:
    """Causes that are places in a piece, as many or more."""
    _known_places.extend(map(Cause, range(len(_known_places), count)))
    return _known_places
