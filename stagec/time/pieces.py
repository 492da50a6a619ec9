"""Pieces of programs: nodes that need nothing of other classes in their midst, replayed once for
every state in which they are met.

The state is what came before, relative to when the first computation can start. The same relative
times give the same relative ends, so what was found once is looked up: a step of thousands of
actions has a few dozen states.

    at 900: product 900..940, all_gather 940..950, product 950..990      replayed, and kept
    at 990: product 990..1030, ...                                       looked up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagec.program.nodes import Node
from stagec.time.streams import (
    COMPUTE,
    INTERFERENCE,
    LAUNCH,
    Cost,
    Part,
    Stream,
    merged,
    part_of,
    streams_of,
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


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What happens in a piece that is met in a state, relative to its base.

    `compute` is the end of its last computation. Of the streams that it used, `streams` has the end,
    and the place of the last node. `busy` is what still runs beside later computations. `parts` is what the compute stream spent
    from the base to `compute`; it waited so long for `inputs` by their number beside that.
    """

    compute: int
    starts: Sequence[int]
    ends: Sequence[int]
    streams: Mapping[Stream, tuple[int, int]]
    busy: Intervals
    parts: Mapping[Part, int]
    waits: Sequence[tuple[int, int]]
    causes: Sequence[Cause]


@dataclass(frozen=True, slots=True)
class Step:
    """A node of a piece, and what it waits for: places in the piece, and numbers of inputs.

    `beside` says that computations after it are slower while it runs."""

    node: Node
    cost: Cost
    streams: tuple[Stream, ...]
    inner: tuple[int, ...]
    inputs: tuple[int, ...]
    beside: bool

    @property
    def computes(self) -> bool:
        """Whether it is on the stream of computations."""
        return self.streams[0] == COMPUTE


@dataclass(slots=True, eq=False)
class Piece:
    """Nodes that are replayed together, and what is known of them.

    `gates` are the inputs of the first computation. What is `late` matters only as far as it comes
    after the base: whatever waits for it starts after the base anyway.
    """

    steps: Sequence[Step]
    computes: bool
    gates: tuple[int, ...]
    late_inputs: tuple[bool, ...]
    streams: tuple[Stream, ...]
    late_streams: tuple[bool, ...]
    sends: tuple[int, ...]
    known: dict[State, Entry] = field(default_factory=dict[State, Entry])

    def entry(self, state: State, slowdown: int) -> Entry:
        """What happens, found at the first time."""
        found = self.known.get(state)
        if found is None:
            found = self.known[state] = _replayed(self, state, slowdown)
        return found


def make_piece(
    nodes: Sequence[Node],
    costs: Sequence[Cost],
    inner: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
    beside: Sequence[bool],
    *,
    overlap: bool,
) -> Piece:
    """A piece of nodes; for each of them the places and the inputs that it waits for."""
    steps: list[Step] = []
    after_base: list[bool] = []
    late_streams: dict[Stream, bool] = {}
    late_inputs = [True] * (1 + max((i for row in inputs for i in row), default=-1))
    for i, node in enumerate(nodes):
        streams = streams_of(node, overlap=overlap)
        late = COMPUTE in streams or any(after_base[j] for j in inner[i])
        for stream in streams:
            if stream != COMPUTE:
                late = late or late_streams.get(stream, False)
        for stream in streams:
            if stream != COMPUTE and stream not in late_streams:
                late_streams[stream] = late
        for number in inputs[i]:
            late_inputs[number] = late_inputs[number] and late
        after_base.append(late)
        steps.append(Step(node, costs[i], streams, tuple(inner[i]), tuple(inputs[i]), beside[i]))
    first = next((step for step in steps if step.computes), None)
    return Piece(
        steps,
        first is not None,
        first.inputs if first is not None else (),
        tuple(late_inputs),
        tuple(late_streams),
        tuple(late_streams.values()),
        tuple(i for i, node in enumerate(nodes) if node.kind == "send" and node.is_message),
    )


def _replayed(piece: Piece, state: State, slowdown: int) -> Entry:
    """Run a piece node by node."""
    starts: list[int] = []
    ends: list[int] = []
    causes: list[Cause] = []
    parts: dict[Part, int] = {}
    waits: list[tuple[int, int]] = []
    free: dict[Stream, int] = dict(zip(piece.streams, state.streams, strict=True))
    free[COMPUTE] = 0
    last: dict[Stream, int] = {}
    busy = list(state.busy)
    for place, step in enumerate(piece.steps):
        compute = free[COMPUTE]
        start, cause = -_FOREVER, Cause()
        for stream in step.streams:
            if free[stream] > start:
                start = free[stream]
                cause = Cause(last[stream]) if stream in last else Cause(stream=stream)
        for i in step.inner:
            if ends[i] > start:
                start, cause = ends[i], Cause(i)
        for i in step.inputs:
            if state.inputs[i] > start:
                start, cause = state.inputs[i], Cause(input=i)
        begun = start + step.cost.launch
        slow = slowdown if step.node.is_computation else 0
        end = stretched(begun, step.cost.time, busy, slow)
        if step.computes:
            spent = {
                LAUNCH: step.cost.launch,
                part_of(step.node): step.cost.time,
                INTERFERENCE: end - begun - step.cost.time,
            }
            if cause.input >= 0:
                waits.append((cause.input, start - compute))
            elif start > compute:  # for a node in the piece, or for the communicator
                awaited = piece.steps[cause.place].node if cause.place >= 0 else step.node
                parts[part_of(awaited)] = parts.get(part_of(awaited), 0) + start - compute
            for part, time in spent.items():
                if time:
                    parts[part] = parts.get(part, 0) + time
        if step.beside:
            busy = merged([*busy, (start, end)])
        for stream in step.streams:
            free[stream], last[stream] = end, place
        starts.append(start)
        ends.append(end)
        causes.append(cause)
    compute = free[COMPUTE]
    left = tuple((max(first, compute), end) for first, end in busy if end > compute)
    used = {stream: (free[stream], place) for stream, place in last.items()}
    used.pop(COMPUTE, None)
    return Entry(compute, starts, ends, used, left, parts, waits, causes)


_FOREVER = 1 << 62
