"""In which order the pieces of all classes are replayed. It depends on what they wait for, not on
what they cost, so it is found once for a structure.

A class goes on until it waits for another one: for a message, or for a collective that joins them.

    stage0   forward 0, forward 1, wait for a gradient      the order: forward 0, forward 1 of
    stage1   wait for a message, forward 0, backward 0      stage0, then forward 0 of stage1, ...
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from stagec.program.groups import Channel, GroupAxes
from stagec.support.diagnostics import error
from stagec.time.clock.join import Joined
from stagec.time.clock.shapes import Shape
from stagec.time.streams import COMPUTE, SHARED, Part, Stream

#: A node: the number of a class, that of its piece, and its place there.
Where = tuple[int, int, int]
#: Stands for the stream of computations among the numbers of streams.
ON_COMPUTE = -1


class Met(NamedTuple):
    """What a class asks when it meets a shape: `gates` and `floors` are those of the shape;
    `streams` are the numbers of its streams among those of the class, each with whether it matters
    only as far as it comes after the base."""

    gates: tuple[int, ...]
    floors: tuple[int, ...]
    streams: tuple[tuple[int, bool], ...]
    computes: bool


class RunPiece(NamedTuple):
    """A class runs a piece that joins no classes; `inputs` are those of the plan."""

    owner: int
    piece: int
    inputs: tuple[tuple[int, int], ...]
    met: Met


class Receive(NamedTuple):
    """A class completes a receive: of the last of these `sources`, on a stream."""

    owner: int
    piece: int
    inputs: tuple[tuple[int, int], ...]
    stream: int
    sources: tuple[Where, ...]


class Send(NamedTuple):
    """A class sends a message that waits for its receives, each of a class on a stream."""

    owner: int
    piece: int
    inputs: tuple[tuple[int, int], ...]
    stream: int
    receives: tuple[Receive, ...]


class Call(NamedTuple):
    """A class comes to a collective that joins classes, when `after` is free, which goes `on` a
    stream. The `last` to come brings all of the call, in the order in which they came: owner, piece
    and stream; it starts then."""

    owner: int
    piece: int
    inputs: tuple[tuple[int, int], ...]
    after: tuple[int, ...]
    on: int
    last: tuple[tuple[int, int, int], ...] = ()


class Proceed(NamedTuple):
    """A class goes on behind a blocking collective, which counts as this part."""

    owner: int
    piece: int
    part: Part


Step = RunPiece | Receive | Send | Call | Proceed


class ReplayOrder(NamedTuple):
    """The steps of a replay, and the streams of each class: a number is a place among them."""

    steps: Sequence[Step]
    streams: Sequence[Sequence[Stream]]


def order_of(plans: Sequence[Joined]) -> ReplayOrder:
    """In which order the pieces of these classes are replayed. Raises `DiagnosticError` if classes
    wait for each other in a ring."""
    return _Ordering(plans).run()


class _Class:
    """A class, and how far it is. `held` has by stream what joins classes and was last there: a
    collective on the stream that all calls share, or a message that waits for its receiver."""

    def __init__(self, number: int, joined: Joined) -> None:
        self.number, self.plan, self.joined = number, joined.plan, joined
        self.done = [False] * len(joined.plan)
        self.position = 0
        self.held: dict[Stream, int] = {}
        self.streams: dict[Stream, int] = {}
        self.receives = {
            each.shape.channel: each.shape.streams[0]
            for each in joined.plan
            if each.shape.joins and each.shape.node.kind == "recv"
        }
        self.met: dict[Shape, Met] = {}

    def stream(self, stream: Stream) -> int:
        """The number of a stream."""
        if stream == COMPUTE:
            return ON_COMPUTE
        return self.streams.setdefault(stream, len(self.streams))

    def meets(self, shape: Shape) -> Met:
        """What it asks when it meets a shape."""
        found = self.met.get(shape)
        if found is None:
            numbers = zip(map(self.stream, shape.streams), shape.late_streams, strict=True)
            met = Met(shape.gates, shape.floors, tuple(numbers), shape.computes)
            found = self.met[shape] = met
        return found


class _Ordering:
    def __init__(self, plans: Sequence[Joined]) -> None:
        self._classes = [_Class(i, joined) for i, joined in enumerate(plans)]
        self._steps: list[Step] = []
        self._ready = deque(self._classes)
        self._waiting: dict[Hashable, list[_Class]] = {}
        self._sent: dict[tuple[int, Channel], list[Where]] = {}
        self._calls: dict[Hashable, list[tuple[int, int, int]]] = {}
        self._count: Counter[tuple[int, GroupAxes]] = Counter()
        self._posted: dict[tuple[int, Stream], deque[tuple[int, Channel, int]]] = {}
        self._called: dict[tuple[int, int], Hashable] = {}
        self._sends: Counter[tuple[int, Channel]] = Counter()
        self._offered: dict[tuple[int, Stream], deque[tuple[int, tuple[int, Channel], int]]] = {}
        self._receivers: dict[tuple[int, Channel], list[tuple[int, Channel]]] = {}
        for number, joined in enumerate(plans):
            self._post(number, joined)
            for channel, senders in joined.senders.items():
                for sender in senders:
                    self._receivers.setdefault(sender, []).append((number, channel))

    def _post(self, owner: int, joined: Joined) -> None:
        """The receives of a class, by stream and in order: each is posted when what it waits for
        has happened, wherever the class is."""
        received: Counter[Channel] = Counter()
        for piece, (shape, _) in enumerate(joined.plan):
            if shape.joins and shape.node.kind == "recv":
                queue = self._posted.setdefault((owner, shape.streams[0]), deque())
                queue.append((piece, shape.channel, received[shape.channel]))
                received[shape.channel] += 1

    def run(self) -> ReplayOrder:
        while self._ready or self._meet():
            if not self._ready:
                continue
            mine = self._ready.popleft()
            while mine.position < len(mine.plan) and self._place(mine):
                mine.position += 1
            if mine.position == len(mine.plan):
                self._receive_all(mine)
        late = [c.joined.name for c in self._classes if not all(c.done)]
        if late:
            raise error(
                f"the replay stands still: {', '.join(late)} wait for each other",
                remedy="see what 'stagec check' says of the order of messages",
            )
        return ReplayOrder(self._steps, [tuple(c.streams) for c in self._classes])

    def _place(self, mine: _Class) -> bool:
        """Run the next piece; False if something that it waits for has not happened yet."""
        number = mine.position
        shape = mine.plan[number].shape
        if not shape.joins:
            return self._run(mine, number, shape)
        if not shape.node.is_message:
            return self._call(mine, number, shape)
        if shape.node.kind == "send":
            return self._offer(mine, number, (mine.number, shape.channel), shape.streams[0])
        return True  # what is received is posted from the start

    def _are_there(self, mine: _Class, number: int) -> bool:
        """Whether the inputs of a piece have happened; what can happen now does."""
        return all(
            mine.done[source] or self._happens(mine, source)
            for source, _ in mine.plan[number].inputs
        )

    def _run(self, mine: _Class, number: int, shape: Shape) -> bool:
        if not self._are_there(mine, number) or self._is_held(mine, shape.streams):
            return False
        inputs = mine.plan[number].inputs
        self._steps.append(RunPiece(mine.number, number, inputs, mine.meets(shape)))
        mine.done[number] = True
        for place, channel in shape.sends:
            key = mine.number, channel
            self._sends[key] += 1
            self._is_sent(key, (mine.number, number, place))
        return True

    def _is_sent(self, key: tuple[int, Channel], at: Where) -> None:
        self._sent.setdefault(key, []).append(at)
        self._wake(key)

    # -- messages that wait for their receivers ----------------------------------------------------

    def _offer(self, mine: _Class, piece: int, key: tuple[int, Channel], stream: Stream) -> bool:
        """A message is to be sent, behind those of its stream that wait too."""
        queue = self._offered.setdefault((mine.number, stream), deque())
        if not queue and self._is_held(mine, (stream,)):
            return False
        queue.append((piece, key, self._sends[key]))
        self._sends[key] += 1
        self._called[mine.number, piece] = mine.number, piece
        mine.held[stream] = piece
        return True

    def _meet(self) -> bool:
        """Send what waits for receivers that are there; False if nothing does. All classes have
        come as far as they can without it."""
        found = False
        for (number, stream), queue in self._offered.items():
            while queue and self._meets(self._classes[number], stream, *queue[0]):
                queue.popleft()
                found = True
        return found

    def _meets(
        self, mine: _Class, stream: Stream, piece: int, key: tuple[int, Channel], number: int
    ) -> bool:
        """Send a message if it can be and all who receive it are there."""
        if not self._are_there(mine, piece):
            return False
        receives: list[Receive] = []
        for owner, channel in self._receivers.get(key, ()):
            other = self._classes[owner]
            on = other.receives[channel]
            queue = self._posted.get((owner, on))
            if queue and queue[0][1:] != (channel, number):
                self._receive(other, queue[-1][0], on)
            if not queue or queue[0][1:] != (channel, number):
                return False
            place = queue[0][0]
            if not self._are_there(other, place):
                return False
            receives.append(Receive(owner, place, other.plan[place].inputs, other.stream(on), ()))
        inputs = mine.plan[piece].inputs
        step = Send(mine.number, piece, inputs, mine.stream(stream), tuple(receives))
        self._steps.append(step)
        mine.done[piece] = True
        self._wake((mine.number, piece))
        self._is_sent(key, (mine.number, piece, 0))
        return True

    # -- what joins classes ------------------------------------------------------------------------

    def _happens(self, mine: _Class, wanted: int) -> bool:
        """Whether what joins classes can be known now: it is then."""
        shape = mine.plan[wanted].shape
        if shape.node.kind == "recv":
            return self._receive(mine, wanted, shape.streams[0])
        self._wait(self._called[mine.number, wanted], mine)
        return False

    def _receive(self, mine: _Class, wanted: int, stream: Stream) -> bool:
        """Complete the receives of a stream in order, up to this one; False if a message has not
        been sent yet. What another pod sends that is not replayed is there from the start."""
        queue = self._posted[mine.number, stream]
        while not mine.done[wanted]:
            piece, channel, number = queue[0]
            sources: list[Where] = []
            for sender in mine.joined.senders.get(channel, ()):
                sent = self._sent.get(sender, ())
                if number >= len(sent):
                    self._wait(sender, mine)
                    return False
                sources.append(sent[number])
            if not self._are_there(mine, piece):
                return False
            inputs = mine.plan[piece].inputs
            on = mine.stream(stream)
            self._steps.append(Receive(mine.number, piece, inputs, on, tuple(sources)))
            mine.done[piece] = True
            queue.popleft()
        return True

    def _receive_all(self, mine: _Class) -> None:
        """Complete what nothing waits for."""
        for (number, stream), queue in self._posted.items():
            if number == mine.number and queue and not self._receive(mine, queue[-1][0], stream):
                return

    def _call(self, mine: _Class, piece: int, shape: Shape) -> bool:
        """A collective of several classes starts when the last one is there; only a blocking one
        keeps the class waiting."""
        step = shape.steps[0]
        group, shared = step.node.group, step.streams[-1] == SHARED
        if (mine.number, piece) not in self._called:
            if not self._are_there(mine, piece) or self._is_held(mine, step.streams[-1:]):
                return False
            self._comes(mine, piece, group, step.streams, shared=shared)
        if not step.computes:
            return True
        if not mine.done[piece]:
            self._wait(self._called[mine.number, piece], mine)
            return False
        self._steps.append(Proceed(mine.number, piece, step.part))
        return True

    def _comes(
        self,
        mine: _Class,
        piece: int,
        group: GroupAxes,
        streams: Sequence[Stream],
        *,
        shared: bool,
    ) -> None:
        members = mine.joined.members[group]
        key = group, members, self._count[mine.number, group]
        self._count[mine.number, group] += 1
        self._called[mine.number, piece] = key
        if shared:
            mine.held[SHARED] = piece
        there = self._calls.setdefault(key, [])
        on = mine.stream(streams[-1])
        there.append((mine.number, piece, on))
        after = tuple(map(mine.stream, streams if shared else streams[:-1]))
        last = tuple(there) if len(there) == len(members) else ()
        self._steps.append(Call(mine.number, piece, mine.plan[piece].inputs, after, on, last))
        for owner, number, _ in last:
            self._classes[owner].done[number] = True
        if last:
            self._wake(key)

    def _is_held(self, mine: _Class, streams: Sequence[Stream]) -> bool:
        """Whether what joins classes and was last on one of these streams has not happened yet."""
        for stream in streams if mine.held else ():
            piece = mine.held.get(stream, -1)
            if piece >= 0 and not mine.done[piece]:
                self._wait(self._called[mine.number, piece], mine)
                return True
        return False

    def _wait(self, key: Hashable, mine: _Class) -> None:
        waiting = self._waiting.setdefault(key, [])
        if mine not in waiting:
            waiting.append(mine)

    def _wake(self, key: Hashable) -> None:
        self._ready.extend(self._waiting.pop(key, ()))
