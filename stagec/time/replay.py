"""The replay of a step: one rank of each class stands for all of its ranks.

Classes run until they wait for another one: for a message, or for a collective that joins them.
Between these points they run pieces (`stagec.time.pieces`), so the cost grows with the number of
actions, not with their nodes. `stagec.time.clock` says what the times mean, node by node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagec.program.groups import Channel, GroupAxes, channel_of
from stagec.program.nodes import Node
from stagec.support.diagnostics import error
from stagec.time.pieces import Entry, Intervals, State
from stagec.time.plan import Planned
from stagec.time.streams import BUBBLE, COMPUTE, Part, Stream, part_of


@dataclass(slots=True, eq=False)
class Placed:
    """When a piece ran: its nodes end at `base` plus `ends`. `before` is the end of the
    computations before it, `cause` the node that what joins classes waited for last; a collective of
    several classes, known by its `key`, was `posted` by this one."""

    planned: Planned
    owner: ClassReplay
    base: int = 0
    ends: Sequence[int] = ()
    entry: Entry | None = None
    before: int = 0
    cause: tuple[Placed, int] | None = None
    posted: int = -1
    key: Hashable = None

    @property
    def node(self) -> Node:
        """The first node; what joins classes has no other."""
        return self.planned.piece.steps[0].node

    @property
    def time(self) -> int:
        """What the call or message of what joins classes takes."""
        return self.planned.piece.steps[0].cost.time


@dataclass(eq=False)
class ClassReplay:
    """The replay of a class: where it is, and what it has spent.

    `senders` are the classes that messages along an axis come from, `members` those that a
    collective joins.
    """

    name: str
    coords: Mapping[str, int]
    plan: Sequence[Planned]
    senders: dict[tuple[str, int], tuple[ClassReplay, ...]] = field(
        default_factory=dict[tuple[str, int], "tuple[ClassReplay, ...]"]
    )
    members: dict[GroupAxes, tuple[ClassReplay, ...]] = field(
        default_factory=dict[GroupAxes, "tuple[ClassReplay, ...]"]
    )

    def __post_init__(self) -> None:
        self.placed = [Placed(planned, self) for planned in self.plan]
        self.position = 0
        self.compute = 0
        self.last_computed: Placed | None = None
        self.streams: dict[Stream, tuple[int, Placed, int]] = {}
        self.busy: Intervals = ()
        self.waited: Counter[Part] = Counter()
        self.uses: Counter[Entry] = Counter()
        self.received: Counter[Channel] = Counter()
        self.calls: Counter[GroupAxes] = Counter()
        self.posted: dict[Stream, deque[tuple[Placed, int]]] = {}

    @property
    def end(self) -> int:
        """When its last node ends."""
        return max([self.compute, *(end for end, _, _ in self.streams.values())])

    def busy_time(self, step: int) -> int:
        """Picoseconds of a step that it does not spend on waiting for other classes."""
        return step - self.parts(step).get(BUBBLE, 0)

    def parts(self, step: int) -> dict[Part, int]:
        """Where the time of a step goes on the compute stream; adds up to the step."""
        found = Counter(self.waited)
        for entry, times in self.uses.items():
            for part, time in entry.parts.items():
                found[part] += time * times
        last = max(self.streams.values(), key=lambda s: s[0], default=None)
        if last is not None and last[0] > self.compute:
            end, placed, place = last
            self.account(found, placed, place, end - self.compute)
        found[BUBBLE] += step - max(self.end, self.compute)
        return {part: time for part, time in found.items() if time}

    def account(self, found: Counter[Part], source: Placed, place: int, amount: int) -> None:
        """Account for time in which computations waited for a node. Of what joins classes, no more
        than it takes is communication: the rest is spent on waiting for the other classes."""
        step = source.planned.piece.steps[place]
        own = amount
        if source.planned.joins and self.senders.get((step.node.over, step.node.by)) != (self,):
            own = min(amount, step.cost.time)
        found[part_of(step.node)] += own
        found[BUBBLE] += amount - own


def replay(classes: Sequence[ClassReplay], slowdown: int = 0) -> int:
    """Replay classes together; the end of the step, in picoseconds. Collectives take `slowdown`
    1024ths of the speed of computations beside them. Raises `DiagnosticError` if classes wait for
    each other in a ring."""
    return _Replay(classes, slowdown).run()


class _Replay:
    def __init__(self, classes: Sequence[ClassReplay], slowdown: int) -> None:
        self._classes, self._slowdown = classes, slowdown
        self._ready = deque(classes)
        self._waiting: dict[Hashable, list[ClassReplay]] = {}
        self._sent: dict[tuple[ClassReplay, Channel], list[tuple[int, Placed, int]]] = {}
        self._calls: dict[Hashable, list[Placed]] = {}

    def run(self) -> int:
        while self._ready:
            mine = self._ready.popleft()
            while mine.position < len(mine.placed) and self._place(mine):
                mine.position += 1
            if mine.position == len(mine.placed):
                self._receive_all(mine)
        late = [
            c.name for c in self._classes if c.position < len(c.placed) or any(c.posted.values())
        ]
        if late:
            raise error(
                f"the replay stands still: {', '.join(late)} wait for each other",
                remedy="see what 'stagec check' says of the order of messages",
            )
        return max((c.end for c in self._classes), default=0)

    def _place(self, mine: ClassReplay) -> bool:
        """Run the next piece; False if something that it waits for has not happened yet."""
        placed = mine.placed[mine.position]
        if not placed.planned.joins:
            return self._run(mine, placed)
        if placed.node.is_message:
            channel = _channel(placed.node)
            stream = placed.planned.piece.steps[0].streams[0]
            mine.posted.setdefault(stream, deque()).append((placed, mine.received[channel]))
            mine.received[channel] += 1
            return True
        return self._call(mine, placed)

    def _inputs(self, mine: ClassReplay, placed: Placed) -> list[int] | None:
        """When the inputs of a piece are there; None if one has not happened yet."""
        times: list[int] = []
        for number, place in placed.planned.inputs:
            source = mine.placed[number]
            if not source.ends and not self._receive(mine, source):
                return None
            times.append(source.base + source.ends[place])
        return times

    # -- pieces ------------------------------------------------------------------------------------

    def _run(self, mine: ClassReplay, placed: Placed) -> bool:
        piece = placed.planned.piece
        times = self._inputs(mine, placed)
        if times is None:
            return False
        base = max([mine.compute, *(times[gate] for gate in piece.gates)])
        free = [mine.streams[s][0] if s in mine.streams else 0 for s in piece.streams]
        state = State(
            _relative(times, piece.late_inputs, base),
            _relative(free, piece.late_streams, base),
            tuple((max(first - base, 0), end - base) for first, end in mine.busy if end > base),
        )
        entry = piece.entry(state, self._slowdown)
        placed.base, placed.entry, placed.ends, placed.before = (
            base,
            entry,
            entry.ends,
            mine.compute,
        )
        if piece.computes:
            if base > mine.compute:
                gate = max(piece.gates, key=times.__getitem__)
                self._waited(mine, placed, gate, base - mine.compute)
            for number, amount in entry.waits:
                self._waited(mine, placed, number, amount)
            mine.uses[entry] += 1
            mine.compute, mine.last_computed = base + entry.compute, placed
        if self._slowdown:
            mine.busy = tuple((base + first, base + end) for first, end in entry.busy)
        for stream, (end, place) in entry.streams.items():
            mine.streams[stream] = base + end, placed, place
        for place in piece.sends:
            key = mine, _channel(piece.steps[place].node)
            self._sent.setdefault(key, []).append((base + entry.ends[place], placed, place))
            self._wake(key)
        return True

    def _waited(self, mine: ClassReplay, placed: Placed, number: int, amount: int) -> None:
        source, place = placed.planned.inputs[number]
        if amount:
            mine.account(mine.waited, mine.placed[source], place, amount)

    # -- what joins classes ------------------------------------------------------------------------

    def _receive(self, mine: ClassReplay, wanted: Placed) -> bool:
        """Complete the receives of a stream in order, up to this one; False if a message has not
        been sent yet, or a collective not been joined by all."""
        if not wanted.node.is_message:
            self._wait(wanted.key, mine)
            return False
        stream = wanted.planned.piece.steps[0].streams[0]
        queue = mine.posted[stream]
        while not wanted.ends:
            placed, number = queue[0]
            senders = mine.senders[placed.node.over, placed.node.by]
            arrivals: list[tuple[int, Placed, int]] = []
            for sender in senders:
                sent = self._sent.get((sender, _channel(placed.node)), ())
                if number >= len(sent):
                    self._wait((sender, _channel(placed.node)), mine)
                    return False
                arrivals.append(sent[number])
            times = self._inputs(mine, placed)
            if times is None:
                return False
            before = mine.streams.get(stream)
            ready = max([0 if before is None else before[0], *times])
            end, *sent_by = max(arrivals, key=lambda a: a[0])
            placed.base, placed.ends = max(ready, end), (0,)
            late = end >= ready
            placed.cause = (
                (sent_by[0], sent_by[1]) if late else self._latest(mine, placed, times, [stream])
            )
            mine.streams[stream] = placed.base, placed, 0
            queue.popleft()
        return True

    def _receive_all(self, mine: ClassReplay) -> None:
        """Complete what nothing waits for."""
        for queue in mine.posted.values():
            if queue and not self._receive(mine, queue[-1][0]):
                return

    def _call(self, mine: ClassReplay, placed: Placed) -> bool:
        """A collective of several classes starts when the last one is there; only a blocking one
        keeps the class waiting."""
        node, streams = placed.node, placed.planned.piece.steps[0].streams
        blocks, members = COMPUTE in streams, mine.members[node.group]
        if placed.posted < 0:
            times = self._inputs(mine, placed)
            if times is None:
                return False
            placed.posted = max([0, *times, *([mine.compute] if blocks else [])])
            placed.cause = self._latest(mine, placed, times, streams)
            key = node.group, members, mine.calls[node.group]
            placed.key = key
            mine.calls[node.group] += 1
            there = self._calls.setdefault(key, [])
            there.append(placed)
            if len(there) == len(members):
                self._start(there)
                self._wake(key)
        if not blocks:
            return True
        if not placed.ends:
            self._wait(placed.key, mine)
            return False
        placed.before = mine.compute
        mine.waited[BUBBLE] += placed.base - mine.compute
        mine.waited[part_of(node)] += placed.ends[0]
        mine.compute, mine.last_computed = placed.base + placed.ends[0], placed
        return True

    def _start(self, there: Sequence[Placed]) -> None:
        """Start a collective on all members; calls of a group follow each other."""
        stream = "group", there[0].node.group
        last = max(there, key=lambda placed: placed.posted)
        before = last.owner.streams.get(stream)
        start = max(last.posted, 0 if before is None else before[0])
        time = max(placed.time for placed in there)
        cause = last.cause if before is None or before[0] <= last.posted else before[1:]
        for placed in there:
            placed.base, placed.ends, placed.cause = start, (time,), cause
            placed.owner.streams[stream] = start + time, placed, 0

    def _latest(
        self, mine: ClassReplay, placed: Placed, times: Sequence[int], streams: Iterable[Stream]
    ) -> tuple[Placed, int] | None:
        """What a node waited for last: an input, or what was on its streams before."""
        found = [(0, mine.placed[n], p) for n, p in placed.planned.inputs]
        found = [(t, source, p) for t, (_, source, p) in zip(times, found, strict=True)]
        found += [mine.streams[s] for s in streams if s in mine.streams]
        if COMPUTE in streams and mine.last_computed is not None:
            found.append((mine.compute, mine.last_computed, len(mine.last_computed.ends) - 1))
        return max(found, key=lambda f: f[0])[1:] if found else None

    def _wait(self, key: Hashable, mine: ClassReplay) -> None:
        waiting = self._waiting.setdefault(key, [])
        if mine not in waiting:
            waiting.append(mine)

    def _wake(self, key: Hashable) -> None:
        self._ready.extend(self._waiting.pop(key, ()))


def _relative(times: Sequence[int], late: Sequence[bool], base: int) -> tuple[int, ...]:
    """Times after a base; those that matter only if they are late, from 0."""
    return tuple(
        time - base if time > base or not after else 0
        for time, after in zip(times, late, strict=True)
    )


def _channel(node: Node) -> Channel:
    assert node.op is not None
    return channel_of(node.op)
