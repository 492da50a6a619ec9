"""The replay of a step: one rank of each class stands for all of its ranks.

Classes run until they wait for another one: for a message, or for a collective that joins them.
Between these points they run pieces (`pieces`), so the cost grows with the number of
actions, not with their nodes. `definition` says what the times mean, node by node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stagec.program.groups import Channel, GroupAxes
from stagec.support.diagnostics import error
from stagec.time.clock.join import Joined
from stagec.time.clock.pieces import Cause, Entry, Intervals, Piece, State
from stagec.time.clock.shapes import Shape
from stagec.time.streams import BUBBLE, COMPUTE, LAUNCH, SHARED, Part, Stream


class At(NamedTuple):
    """A node of a class: the number of its piece, and its place there."""

    owner: ClassReplay
    piece: int
    place: int


class ClassReplay:
    """The replay of a class: where it is, and what it has spent.

    Piece i ran at `bases[i]`, its nodes ended `ends[i]` later. `causes` has what pieces that join
    classes waited for last, `sources` what was before a piece on the streams that it waited for.
    `called` is the last collective that joins classes on the stream that all calls share.
    """

    def __init__(self, number: int, joined: Joined, pieces: Callable[[Shape], Piece]) -> None:
        self.number, self.name, self.joined = number, joined.name, joined
        self.plan = joined.plan
        self.pieces = [pieces(planned.shape) for planned in joined.plan]
        self.bases = [0] * len(self.plan)
        self.ends: list[Sequence[int]] = [()] * len(self.plan)
        self.entries: list[Entry | None] = [None] * len(self.plan)
        self.causes: dict[int, At | None] = {}
        self.sources: dict[int, Mapping[Stream, tuple[int, int]]] = {}
        self.position = 0
        self.compute = 0
        self.computed = -1
        self.streams: dict[Stream, tuple[int, int, int]] = {}
        self.called = -1
        self.busy: Intervals = ()
        self.waited: Counter[Part] = Counter()
        self.uses: Counter[Entry] = Counter()
        self._parts: dict[int, dict[Part, int]] = {}

    @property
    def end(self) -> int:
        """When its last node ends."""
        return max([self.compute, *(end for end, _, _ in self.streams.values())])

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
        found = Counter(self.waited)
        for number, place, count in self.joined.computed:
            cost = self.pieces[number].costs[place]
            found[self.plan[number].shape.steps[place].part] += cost.time * count
            found[LAUNCH] += cost.launch * count
        for entry, times in self.uses.items():
            for part, time in entry.parts.items():
                found[part] += time * times
        last = max(self.streams.values(), key=lambda s: s[0], default=None)
        if last is not None and last[0] > self.compute:
            end, piece, place = last
            for part, time in self.spent(piece, place, end - self.compute):
                found[part] += time
        found[BUBBLE] += step - self.end
        return {part: time for part, time in found.items() if time}

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
                    took = self.pieces[piece].costs[place].time if message else self.ends[piece][0]
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
        return self.joined.senders.get(shape.channel) == [(self.number, shape.channel)]


def replay(classes: Sequence[ClassReplay], slowdown: int = 0) -> int:
    """Replay classes together; the end of the step, in picoseconds. Collectives take `slowdown`
    1024ths of the speed of computations beside them. Raises `DiagnosticError` if classes wait for
    each other in a ring."""
    return _Replay(classes, slowdown).run()


class _Call:
    """A collective of several classes: who is there, and since when."""

    def __init__(self) -> None:
        self.there: list[tuple[ClassReplay, int, int, At | None]] = []


class _Replay:
    def __init__(self, classes: Sequence[ClassReplay], slowdown: int) -> None:
        self._classes, self._slowdown = classes, slowdown
        self._ready = deque(classes)
        self._waiting: dict[Hashable, list[ClassReplay]] = {}
        self._sent: dict[tuple[int, Channel], list[tuple[int, At]]] = {}
        self._calls: dict[Hashable, _Call] = {}
        self._count: Counter[tuple[int, GroupAxes]] = Counter()
        self._received: Counter[tuple[int, Channel]] = Counter()
        self._posted: dict[tuple[int, Stream], deque[tuple[int, Channel, int]]] = {}
        self._called: dict[tuple[int, int], Hashable] = {}

    def run(self) -> int:
        while self._ready:
            mine = self._ready.popleft()
            while mine.position < len(mine.plan) and self._place(mine):
                mine.position += 1
            if mine.position == len(mine.plan):
                self._receive_all(mine)
        late = [c.name for c in self._classes if not all(c.ends)]
        if late:
            raise error(
                f"the replay stands still: {', '.join(late)} wait for each other",
                remedy="see what 'stagec check' says of the order of messages",
            )
        return max((c.end for c in self._classes), default=0)

    def _place(self, mine: ClassReplay) -> bool:
        """Run the next piece; False if something that it waits for has not happened yet."""
        shape = mine.plan[mine.position].shape
        if not shape.joins:
            return self._run(mine, mine.position)
        if not shape.node.is_message:
            return self._call(mine, mine.position)
        channel = shape.channel
        queue = self._posted.setdefault((mine.number, shape.streams[0]), deque())
        queue.append((mine.position, channel, self._received[mine.number, channel]))
        self._received[mine.number, channel] += 1
        return True

    def _inputs(self, mine: ClassReplay, piece: int) -> list[int] | None:
        """When the inputs of a piece are there; None if one has not happened yet."""
        times: list[int] = []
        for source, place in mine.plan[piece].inputs:
            if not mine.ends[source] and not self._happens(mine, source):
                return None
            times.append(mine.bases[source] + mine.ends[source][place])
        return times

    # -- pieces ------------------------------------------------------------------------------------

    def _run(self, mine: ClassReplay, number: int) -> bool:
        shape, streams = mine.plan[number].shape, mine.streams
        times = self._inputs(mine, number)
        if times is None or (SHARED in shape.streams and self._is_held(mine)):
            return False
        base = mine.compute
        for gate in shape.gates:
            if times[gate] > base:
                base = times[gate]
        state = _state(mine, shape, times, base)
        entry = mine.pieces[number].entry(state, self._slowdown)
        mine.bases[number], mine.entries[number], mine.ends[number] = base, entry, entry.ends
        if entry.before:
            mine.sources[number] = {s: streams[s][1:] for s in entry.before if s in streams}
        if shape.computes:
            _computed(mine, number, entry, times)
        if self._slowdown:
            mine.busy = tuple((base + first, base + end) for first, end in entry.busy)
        for stream, (end, place) in entry.streams.items():
            streams[stream] = base + end, number, place
        for place, channel in shape.sends:
            key = mine.number, channel
            sent = base + entry.ends[place], At(mine, number, place)
            self._sent.setdefault(key, []).append(sent)
            self._wake(key)
        return True

    # -- what joins classes ------------------------------------------------------------------------

    def _happens(self, mine: ClassReplay, wanted: int) -> bool:
        """Whether what joins classes can be known now: it is then."""
        shape = mine.plan[wanted].shape
        if shape.node.is_message:
            return self._receive(mine, wanted, shape.streams[0])
        self._wait(self._called[mine.number, wanted], mine)
        return False

    def _receive(self, mine: ClassReplay, wanted: int, stream: Stream) -> bool:
        """Complete the receives of a stream in order, up to this one; False if a message has not
        been sent yet. What another pod sends that is not replayed is there from the start."""
        queue = self._posted[mine.number, stream]
        while not mine.ends[wanted]:
            piece, channel, number = queue[0]
            arrivals: list[tuple[int, At]] = []
            for sender in mine.joined.senders.get(channel, ()):
                sent = self._sent.get(sender, ())
                if number >= len(sent):
                    self._wait(sender, mine)
                    return False
                arrivals.append(sent[number])
            times = self._inputs(mine, piece)
            if times is None:
                return False
            ready, cause = self._latest(mine, piece, times, (stream,))
            end, sender_at = max(arrivals, key=lambda a: a[0], default=(0, None))
            mine.bases[piece], mine.ends[piece] = max(ready, end), (0,)
            mine.causes[piece] = sender_at if end >= ready else cause
            mine.streams[stream] = mine.bases[piece], piece, 0
            queue.popleft()
        return True

    def _receive_all(self, mine: ClassReplay) -> None:
        """Complete what nothing waits for."""
        for (number, stream), queue in self._posted.items():
            if number == mine.number and queue and not self._receive(mine, queue[-1][0], stream):
                return

    def _call(self, mine: ClassReplay, piece: int) -> bool:
        """A collective of several classes starts when the last one is there; only a blocking one
        keeps the class waiting."""
        step = mine.plan[piece].shape.steps[0]
        blocks, group, stream = step.computes, step.node.group, step.streams[-1]
        shared = stream == SHARED
        members = mine.joined.members[group]
        if (mine.number, piece) not in self._called:
            times = self._inputs(mine, piece)
            if times is None or (shared and self._is_held(mine)):
                return False
            after = step.streams if shared else step.streams[:-1]
            ready, cause = self._latest(mine, piece, times, after)
            key = group, members, self._count[mine.number, group]
            self._count[mine.number, group] += 1
            self._called[mine.number, piece] = key
            mine.called = piece if shared else -1
            call = self._calls.setdefault(key, _Call())
            call.there.append((mine, piece, ready, cause))
            if len(call.there) == len(members):
                _start(call, stream)
                self._wake(key)
        if not blocks:
            return True
        if not mine.ends[piece]:
            self._wait(self._called[mine.number, piece], mine)
            return False
        mine.waited[BUBBLE] += mine.bases[piece] - mine.compute
        mine.waited[step.part] += mine.ends[piece][0]
        mine.compute, mine.computed = mine.bases[piece] + mine.ends[piece][0], piece
        return True

    def _is_held(self, mine: ClassReplay) -> bool:
        """Whether the last collective on the shared stream has not happened yet."""
        if mine.called < 0 or mine.ends[mine.called]:
            return False
        self._wait(self._called[mine.number, mine.called], mine)
        return True

    def _latest(
        self, mine: ClassReplay, piece: int, times: Sequence[int], streams: Iterable[Stream]
    ) -> tuple[int, At | None]:
        """When a node is ready, and what it waited for last: an input, or what was on a stream."""
        ready, cause = 0, None
        for time, (source, place) in zip(times, mine.plan[piece].inputs, strict=True):
            if time >= ready:
                ready, cause = time, At(mine, source, place)
        for stream in streams:
            if stream == COMPUTE:
                before = mine.compute, mine.computed, -1
            else:
                before = mine.streams.get(stream, (0, -1, 0))
            if before[1] >= 0 and before[0] > ready:
                ready, cause = before[0], At(mine, *before[1:])
        return ready, cause

    def _wait(self, key: Hashable, mine: ClassReplay) -> None:
        waiting = self._waiting.setdefault(key, [])
        if mine not in waiting:
            waiting.append(mine)

    def _wake(self, key: Hashable) -> None:
        self._ready.extend(self._waiting.pop(key, ()))


def _computed(mine: ClassReplay, number: int, entry: Entry, times: Sequence[int]) -> None:
    """Account for a piece with computations, whose inputs came at these times, and for the wait
    before it."""
    base, gates = mine.bases[number], mine.plan[number].shape.gates
    waits = list(entry.waits)
    if base > mine.compute:
        waits.append((Cause(input=max(gates, key=times.__getitem__)), base - mine.compute))
    for cause, amount in waits:
        source = mine.source(number, cause)
        if source is not None:
            for part, time in mine.spent(*source, amount):
                mine.waited[part] += time
    mine.uses[entry] += 1
    mine.compute, mine.computed = base + entry.compute, number


def _start(call: _Call, stream: Stream) -> None:
    """Start a collective on all members; calls of a group follow each other."""
    last, _, start, cause = max(call.there, key=lambda there: there[2])
    before = last.streams.get(stream)
    follows = before is not None and before[0] > start
    start = before[0] if before is not None and follows else start
    time = max(each.pieces[piece].costs[0].time for each, piece, _, _ in call.there)
    for each, piece, _, _ in call.there:
        each.bases[piece], each.ends[piece] = start, (time,)
        each.causes[piece] = At(each, *each.streams[stream][1:]) if follows else cause
        each.streams[stream] = start + time, piece, 0


def _state(mine: ClassReplay, shape: Shape, times: Sequence[int], base: int) -> State:
    """How a class meets a piece whose inputs come at these times."""
    streams = mine.streams
    free: list[int] = []
    for stream, late in zip(shape.streams, shape.late_streams, strict=True):
        time = (streams[stream][0] if stream in streams else 0) - base
        free.append(-1 if late and time < 0 else time)  # whatever waits for it waits for more
    floors = *free, 0, -base - 1  # by the number of a stream, `BASE` and `NO_FLOOR`
    inputs = [max(time - base, floors[f]) for time, f in zip(times, shape.floors, strict=True)]
    busy = tuple((max(first - base, 0), end - base) for first, end in mine.busy if end > base)
    return State(tuple(inputs), tuple(free), busy)
