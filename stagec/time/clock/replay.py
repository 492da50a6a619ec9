"""The replay of a step: one rank of each class stands for all of its ranks.

Classes run pieces (`pieces`) and join each other in a given order (`order`), so the cost grows with
the number of actions, not with their nodes. `definition` says what the times mean, node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stagec.time.clock.join import Joined
from stagec.time.clock.order import (
    ON_COMPUTE,
    Call,
    Proceed,
    Receive,
    ReplayOrder,
    RunPiece,
    Send,
    Where,
    order_of,
)
from stagec.time.clock.paths import PathTimes
from stagec.time.clock.pieces import Cause, Entry, Intervals, Piece
from stagec.time.clock.shapes import Shape
from stagec.time.streams import BUBBLE, LAUNCH, Part, Stream


class At(NamedTuple):
    """A node of a class: the number of its piece, and its place there."""

    owner: ClassReplay
    piece: int
    place: int

    @property
    def end(self) -> int:
        """When it ends."""
        return self.owner.bases[self.piece] + self.owner.ends[self.piece][self.place]


#: When something is ready, and what it waited for last.
_Ready = tuple[int, At | None]


class ClassReplay:
    """The replay of a class: where it is, and what it has spent.

    Piece i ran at `bases[i]`, its nodes ended `ends[i]` later. `causes` has what pieces that join
    classes waited for last, `sources` what was before a piece on the streams that it waited for.
    `gaps` has how long computations waited for the inputs of a piece, or for a blocking call.
    Stream i is free from `free[i]` on, after the node `last[i]`: the number of its piece, and its
    place there.
    """

    def __init__(self, number: int, joined: Joined, pieces: Callable[[Shape], Piece]) -> None:
        self.number, self.name, self.joined = number, joined.name, joined
        self.plan = joined.plan
        self._pieces = pieces
        self.pieces: list[Piece] = []
        self.bases: list[int] = []
        self.ends: list[Sequence[int]] = []
        self.entries: list[Entry | None] = []
        self.causes: dict[int, At | None] = {}
        self.sources: dict[int, Mapping[Stream, tuple[int, int]]] = {}
        self.gaps: dict[int, int] = {}
        self.compute = 0
        self.computed = -1
        self.names: Sequence[Stream] = ()
        self.free: list[int] = []
        self.last: list[tuple[int, int]] = []
        self.busy: Intervals = ()
        self._parts: dict[int, dict[Part, int]] = {}

    def begin(self, streams: Sequence[Stream]) -> None:
        """Begin a step with these streams."""
        shapes = self.joined.shapes
        known = {shape: self._pieces(shape) for shape in dict.fromkeys(shapes)}
        self.pieces = [*map(known.__getitem__, shapes)]
        self.bases, self.ends = [0] * len(shapes), [()] * len(shapes)
        self.entries = [None] * len(shapes)
        self.names = streams
        self.free, self.last = [0] * len(streams), [(-1, 0)] * len(streams)

    @property
    def streams(self) -> dict[Stream, tuple[int, int, int]]:
        """The end of what was last on each stream, its piece and its place there."""
        found = zip(self.names, self.free, self.last, strict=True)
        return {stream: (end, *at) for stream, end, at in found if at[0] >= 0}

    @property
    def end(self) -> int:
        """When its last node ends."""
        return max(self.compute, *self.free) if self.free else self.compute

    def busy_time(self, step: int) -> int:
        """Picoseconds of a step that it does not spend on waiting for other classes."""
        return step - self.parts(step).get(BUBBLE, 0)

    def parts(self, step: int) -> dict[Part, int]:
        """Where the time of a step goes on the compute stream, after the replay; adds up to the
        step."""
        if step not in self._parts:
            self._parts[step] = self._found_parts(step)
        return self._parts[step]

    def _found_parts(self, step: int) -> dict[Part, int]:
        found: Counter[Part] = Counter()
        for number, shape in enumerate(self.joined.shapes):
            entry = self.entries[number]
            if shape.computes and (entry is None or entry.waits or number in self.gaps):
                for part, time in self._waited(number, entry):
                    found[part] += time
        for number, place, count in self.joined.computed:
            cost = self.pieces[number].costs[place]
            found[self.plan[number].shape.steps[place].part] += cost.time * count
            found[LAUNCH] += cost.launch * count
        for entry, times in Counter(e for e in self.entries if e is not None).items():
            for part, time in entry.parts.items():
                found[part] += time * times
        last = max(self.streams.values(), key=lambda s: s[0], default=None)
        if last is not None and last[0] > self.compute:
            end, piece, place = last
            for part, time in self.spent(piece, place, end - self.compute):
                found[part] += time
        found[BUBBLE] += step - self.end
        return {part: time for part, time in found.items() if time}

    def _waited(self, number: int, entry: Entry | None) -> Iterator[tuple[Part, int]]:
        """What computations of a piece waited for that is outside of it, and a blocking call."""
        planned, gap = self.plan[number], self.gaps.get(number, 0)
        if entry is None:
            yield BUBBLE, gap
            yield planned.shape.steps[0].part, self.ends[number][0]
            return
        waits = list(entry.waits)
        if gap:
            times = {
                i: self.bases[source] + self.ends[source][place]
                for i, (source, place) in enumerate(planned.inputs)
                if i in planned.shape.gates
            }
            waits.append((Cause(input=max(planned.shape.gates, key=times.__getitem__)), gap))
        for cause, amount in waits:
            source = self.source(number, cause)
            if source is not None:
                yield from self.spent(*source, amount)

    def spent(self, piece: int, place: int, amount: int) -> Iterator[tuple[Part, int]]:
        """What the time counts as in which computations waited for a node, from its end backwards:
        the node while it ran, and before that what it waited for. Of what joins classes, no more
        than it takes is communication: the rest is spent on waiting for the other classes."""
        while amount > 0:
            shape, entry = self.plan[piece].shape, self.entries[piece]
            if entry is None:
                before, message = self.causes[piece], shape.node.is_message
                own = 0
                if not (message and self._from_itself(shape)):
                    received = message and shape.node.kind == "recv"
                    took = self.pieces[piece].costs[place].time if received else self.ends[piece][0]
                    own = min(amount, took)
                    yield shape.steps[place].part, own
                    amount -= own
                if before is None or before.owner is not self or before.place < 0:
                    yield BUBBLE, amount
                    return
                piece, place = before.piece, before.place
                continue
            own = min(amount, entry.ends[place] - entry.starts[place])
            yield shape.steps[place].part, own
            amount -= own
            cause = entry.causes[place]
            if cause.place >= 0:
                place = cause.place
                continue
            source = self.source(piece, cause)
            if source is None:
                return
            piece, place = source

    def source(self, piece: int, cause: Cause) -> tuple[int, int] | None:
        """The piece and the place of what a node waited for that is outside of its piece; None for
        what starts with the step."""
        if cause.input >= 0:
            return self.plan[piece].inputs[cause.input]
        return self.sources.get(piece, {}).get(cause.stream)

    def _from_itself(self, shape: Shape) -> bool:
        here = self.joined.senders.get(shape.channel) == [(self.number, shape.channel)]
        return here and shape.node.kind == "recv"


def replay(
    classes: Sequence[ClassReplay], slowdown: int = 0, order: ReplayOrder | None = None
) -> int:
    """Replay classes together, in the `order` of their plans; the end of the step, in picoseconds.
    Collectives take `slowdown` 1024ths of the speed of computations beside them. Raises
    `DiagnosticError` if classes wait for each other in a ring."""
    if order is None:
        order = order_of([each.joined for each in classes])
    for each, streams in zip(classes, order.streams, strict=True):
        each.begin(streams)
    waiting: dict[tuple[int, int], _Ready] = {}
    for step in order.steps:
        mine = classes[step.owner]
        match step:
            case RunPiece():
                _run(mine, step, slowdown)
            case Receive():
                sent = [At(classes[owner], piece, place) for owner, piece, place in step.sources]
                _receive(mine, step, [(at.end, at) for at in sent])
            case Send():
                _send(classes, step)
            case Call():
                waiting[step.owner, step.piece] = _latest(mine, step.inputs, step.after)
                if step.last:
                    _start(classes, step.last, waiting)
            case Proceed():
                _proceed(mine, step)
    return max((each.end for each in classes), default=0)


def replay_alone(mine: ClassReplay, order: ReplayOrder, times: PathTimes) -> ClassReplay:
    """Replay one class, whose `times` where it meets others are known. Of other classes it knows
    times alone: they cause what they are late for, but have no nodes."""
    mine.begin(order.streams[mine.number])
    sent, calls = times.sent(mine.number), times.calls(mine.number)
    for step in order.steps:
        if step.owner != mine.number:
            continue
        match step:
            case RunPiece():
                _run(mine, step, 0)
            case Receive():
                _receive(mine, step, [(next(sent), _own(mine, where)) for where in step.sources])
            case Send():
                raise ValueError("a structure with sends that wait has no paths")
            case Call():
                call, (_, cause) = next(calls), _latest(mine, step.inputs, step.after)
                owner, ready = max(call.ready, key=lambda each: each[1])
                of = cause if owner == mine.number else None
                _join(mine, step.piece, step.on, (ready, of), call.time)
            case Proceed():
                _proceed(mine, step)
    return mine


def _own(mine: ClassReplay, where: Where) -> At | None:
    owner, piece, place = where
    return At(mine, piece, place) if owner == mine.number else None


def _run(mine: ClassReplay, step: RunPiece, slowdown: int) -> None:
    """Run a piece. The state in which a class meets it is relative to when its first computation
    can start."""
    _, number, inputs, (gates, below, streams, computes) = step
    bases, ends, free = mine.bases, mine.ends, mine.free
    times = [bases[source] + ends[source][place] for source, place in inputs]
    base = compute = mine.compute
    for gate in gates:
        if times[gate] > base:
            base = times[gate]
    until = tuple(
        [  # whatever waits for what is late waits for more
            -1 if late and free[stream] < base else free[stream] - base for stream, late in streams
        ]
    )
    if times:
        floors = *until, 0, -base - 1  # by the number of a stream, `BASE` and `NO_FLOOR`
        times = [
            floors[f] if time - base < floors[f] else time - base
            for time, f in zip(times, below, strict=True)
        ]
    busy = mine.busy
    if busy:
        busy = tuple([(max(first - base, 0), end - base) for first, end in busy if end > base])
    entry = mine.pieces[number].entry((tuple(times), until, busy), slowdown)
    bases[number], mine.entries[number], ends[number] = base, entry, entry.ends
    if entry.before:
        mine.sources[number] = {
            mine.names[i]: mine.last[i]
            for i, _ in streams
            if mine.names[i] in entry.before and mine.last[i][0] >= 0
        }
    if computes:
        if base > compute:
            mine.gaps[number] = base - compute
        mine.compute, mine.computed = base + entry.compute, number
    if slowdown:
        mine.busy = tuple((base + first, base + end) for first, end in entry.busy)
    for (stream, _), (end, place) in zip(streams, entry.streams, strict=True):
        free[stream], mine.last[stream] = base + end, (number, place)


def _receive(mine: ClassReplay, step: Receive, sources: Iterable[_Ready]) -> None:
    """Complete a receive: it lasts until the message is there from all of these."""
    ready, cause = _latest(mine, step.inputs, (step.stream,))
    sent, by = max(sources, key=lambda source: source[0], default=(0, None))
    if sent >= ready:
        ready, cause = sent, by
    mine.bases[step.piece], mine.ends[step.piece] = ready, (0,)
    mine.causes[step.piece] = cause
    mine.free[step.stream], mine.last[step.stream] = ready, (step.piece, 0)


def _send(classes: Sequence[ClassReplay], step: Send) -> None:
    """Send a message when it is ready and its sender has heard of all receivers."""
    mine, piece = classes[step.owner], step.piece
    start, cause = _latest(mine, step.inputs, (step.stream,))
    for each in step.receives:
        other = classes[each.owner]
        ready, by = _latest(other, each.inputs, (each.stream,))
        ready += other.pieces[each.piece].costs[0].handshake or 0
        if ready > start:
            start, cause = ready, by
    end = mine.pieces[piece].costs[0].time
    mine.bases[piece], mine.ends[piece] = start, (end,)
    mine.causes[piece] = cause
    mine.free[step.stream], mine.last[step.stream] = start + end, (piece, 0)


def _start(
    classes: Sequence[ClassReplay],
    there: Sequence[tuple[int, int, int]],
    waiting: Mapping[tuple[int, int], _Ready],
) -> None:
    """Start a collective on all members."""
    ready = max((waiting[at[:2]] for at in there), key=lambda each: each[0])
    time = max(classes[owner].pieces[piece].costs[0].time for owner, piece, _ in there)
    for owner, piece, stream in there:
        _join(classes[owner], piece, stream, ready, time)


def _join(mine: ClassReplay, piece: int, stream: int, ready: _Ready, time: int) -> None:
    """Start a collective on one member, which may be ready later: calls of a group follow each
    other."""
    (start, cause), before = ready, mine.free[stream]
    if before > start:
        start, cause = before, At(mine, *mine.last[stream])
    mine.bases[piece], mine.ends[piece] = start, (time,)
    mine.causes[piece] = cause
    mine.free[stream], mine.last[stream] = start + time, (piece, 0)


def _proceed(mine: ClassReplay, step: Proceed) -> None:
    """Go on behind a blocking collective."""
    piece = step.piece
    base = mine.bases[piece]
    mine.gaps[piece] = base - mine.compute
    mine.compute, mine.computed = base + mine.ends[piece][0], piece


def _latest(mine: ClassReplay, inputs: Sequence[tuple[int, int]], streams: Sequence[int]) -> _Ready:
    """When a node is ready, and what it waited for last: an input, or what was on a stream."""
    ready = 0
    cause: At | None = None
    for source, place in inputs:
        time = mine.bases[source] + mine.ends[source][place]
        if time >= ready:
            ready, cause = time, At(mine, source, place)
    for stream in streams:
        if stream == ON_COMPUTE:
            free, last = mine.compute, (mine.computed, -1)
        else:
            free, last = mine.free[stream], mine.last[stream]
        if last[0] >= 0 and free > ready:
            ready, cause = free, At(mine, *last)
    return ready, cause
