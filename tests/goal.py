"""GOAL as its readers see it: a parser of the text and of the binary, and LogGP on one machine a
rank. All three are written from spcl/atlahs, sim/LogGOPSim (txt2bin.re, Parser.hpp, LogGOPSim.cpp).
"""

from __future__ import annotations

import heapq
import re
import struct
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

_OP = re.compile(
    r"(?:(?P<label>[a-zA-Z]\w*): )?(?:calc (?P<time>\d+)|(?P<way>send|recv) (?P<size>\d+)b "
    r"(?:to|from) (?P<peer>\d+)(?: tag (?P<tag>\d+))?)(?: cpu (?P<cpu>\d+))?(?: nic (?P<nic>\d+))?"
)
_EDGE = re.compile(r"([a-zA-Z]\w*) (i?)requires ([a-zA-Z]\w*)")
WAYS = ("", "send", "recv", "calc")


@dataclass
class Op:
    """An operation; `waits` are the places of those that have to be over."""

    way: str
    size: int
    peer: int = 0
    tag: int = 0
    cpu: int = 0
    waits: list[int] = field(default_factory=list[int])


Rank = list[Op]


def parse(text: str) -> list[Rank]:
    """The operations of all ranks. Raises ValueError for what is no GOAL."""
    assert text.endswith("\n")
    first, *lines = text.splitlines()
    ranks: list[Rank] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line == f"rank {len(ranks)} {{":
            ranks.append([])
            labels = {}
        elif match := _EDGE.fullmatch(line):
            if match[2]:
                raise ValueError(f"no irequires here: {line}")
            ranks[-1][labels[match[1]]].waits.append(labels[match[3]])
        elif match := _OP.fullmatch(line):
            actual = match.groupdict()
            assert actual["label"] not in labels
            labels[actual["label"]] = len(ranks[-1])
            size = int(actual["time"] or actual["size"] or 0)
            peer, tag, cpu = (int(actual[key] or 0) for key in ("peer", "tag", "cpu"))
            ranks[-1].append(Op(actual["way"] or "calc", size, peer, tag, cpu))
        elif line != "}":
            raise ValueError(f"no GOAL: {line}")
    assert first == f"num_ranks {len(ranks)}"
    return ranks


def unpack(data: bytes) -> list[Rank]:
    """The same of binary GOAL."""
    magic, ranks, cpus, nics = struct.unpack_from("<QIBB", data)
    assert (magic, nics) == (4223, 0)
    table = struct.unpack_from(f"<{2 * ranks}Q", data, 14)
    assert table[0] == 6 + 16 * ranks
    assert [*table[2::2], len(data) - 8] == [*table[1::2]]
    actual = [_unpacked(data[8 + start : 8 + end]) for start, end in _pairs(table)]
    assert all(op.cpu <= cpus for rank in actual for op in rank)
    return actual


def _pairs(table: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(table[::2], table[1::2], strict=True)


def _unpacked(data: bytes) -> Rank:
    nodes, roots = struct.unpack_from("<II", data)
    first = struct.unpack_from(f"<{roots}I", data, 8)
    rows = [struct.unpack_from("<IBIQIBBIIII", data, 8 + 4 * roots + 39 * i) for i in range(nodes)]
    rest = data[8 + 4 * roots + 39 * nodes :]
    appendix = struct.unpack(f"<{len(rest) // 4}I", rest)
    ops: Rank = [Op(WAYS[r[1]], r[3], r[2], r[4], r[5]) for r in rows]
    for i, row in enumerate(rows):
        assert row[9] == 0
        for waiting in map(int, appendix[row[8] : row[8] + row[7]]):
            ops[waiting].waits.append(i)
    assert [len(op.waits) for op in ops] == [row[0] for row in rows]
    assert [i for i, op in enumerate(ops) if not op.waits] == list(first)
    return ops


@dataclass
class LogGP:
    """Nanoseconds: latency `L`, overhead `o` and gap `g` of a message, `G` of each further byte.
    Messages of more than `S` bytes hold up what waits for their send until they are received."""

    L: int = 0
    o: int = 0
    g: int = 0
    G: float = 0.0
    S: int = 1 << 60

    def ends(self, ranks: list[Rank]) -> list[int]:
        """When each rank has done its last operation. Raises ValueError if some never start."""
        return Run(self, ranks).ends()


Resource = tuple[str, int, int]
Channel = tuple[int, int, int]


class Run:
    """Operations and messages on their way, in order of time. What cannot start yet is put back."""

    def __init__(self, model: LogGP, ranks: list[Rank]) -> None:
        self.model, self.ranks = model, ranks
        self.left = [[len(op.waits) for op in rank] for rank in ranks]
        self.ready = [[0] * len(rank) for rank in ranks]
        self.users = [_users(rank) for rank in ranks]
        #: cpus ("o"), and the network out ("gs") and in ("gr")
        self.free: defaultdict[Resource, int] = defaultdict(int)
        self.early: defaultdict[Channel, deque[int]] = defaultdict(deque)
        self.posted: defaultdict[Channel, deque[int]] = defaultdict(deque)
        self.ended = [0] * len(ranks)
        self.queue: list[tuple[int, int, str, int, int, int]] = []
        self.order = count()

    def ends(self) -> list[int]:
        """When each rank ends."""
        for rank, ops in enumerate(self.ranks):
            for place, op in enumerate(ops):
                if not op.waits:
                    self.push(0, op.way, rank, place)
        steps = {"message": self.message, "recv": self.receive}
        while self.queue:
            time, _, what, rank, place, sender = heapq.heappop(self.queue)
            steps.get(what, self.start)(time, rank, place, sender)
        waiting = [*self.posted.values(), *self.early.values()]
        if any(map(any, self.left)) or any(waiting):
            raise ValueError("some operations never start, or messages are never received")
        return self.ended

    def push(self, time: int, what: str, rank: int, place: int, sender: int = -1) -> None:
        """Try this at a time."""
        heapq.heappush(self.queue, (time, next(self.order), what, rank, place, sender))

    def start(self, time: int, rank: int, place: int, _: int) -> None:
        """A computation or a send."""
        op, model = self.ranks[rank][place], self.model
        sends = op.way == "send"
        begin = max(time, self.free["o", rank, op.cpu], self.free["gs", rank, 0] * sends)
        if begin > time:
            self.push(begin, op.way, rank, place)
            return
        end = time + (model.o if sends else op.size)
        self.free["o", rank, op.cpu] = end
        if sends:
            wire = int((op.size - 1) * model.G)
            self.free["gs", rank, 0] = time + model.g + wire
            self.push(end + model.L + wire, "message", op.peer, place, rank)
        if not sends or op.size <= model.S:
            self.done(rank, place, end)

    def message(self, time: int, rank: int, place: int, sender: int) -> None:
        """Operation `place` of the sender has arrived."""
        channel = rank, sender, self.ranks[sender][place].tag
        if not self.posted[channel]:
            self.early[channel].append(place)
            return
        cpu = self.ranks[rank][self.posted[channel][0]].cpu
        begin = max(time, self.free["o", rank, cpu], self.free["gr", rank, 0])
        if begin > time:
            self.push(begin, "message", rank, place, sender)
        else:
            self.received(rank, self.posted[channel].popleft(), sender, place, begin)

    def receive(self, time: int, rank: int, place: int, _: int) -> None:
        """A receive; of a message that is there when what is being sent is out."""
        op = self.ranks[rank][place]
        channel = rank, op.peer, op.tag
        if self.early[channel]:
            begin = max(time, self.free["gs", rank, 0])
            self.received(rank, place, op.peer, self.early[channel].popleft(), begin)
        else:
            self.posted[channel].append(place)

    def received(self, rank: int, place: int, sender: int, sent: int, begin: int) -> None:
        """Both ends are there."""
        end = begin + self.model.g + self.model.o
        self.free["o", rank, self.ranks[rank][place].cpu] = end
        self.free["gr", rank, 0] = begin + self.model.g
        if self.ranks[sender][sent].size > self.model.S:
            self.done(sender, sent, end)
        self.done(rank, place, end)

    def done(self, rank: int, place: int, time: int) -> None:
        """What waits for an operation may start."""
        self.ended[rank] = max(self.ended[rank], time)
        for user in self.users[rank][place]:
            self.ready[rank][user] = max(self.ready[rank][user], time)
            self.left[rank][user] -= 1
            if not self.left[rank][user]:
                self.push(self.ready[rank][user], self.ranks[rank][user].way, rank, user)


def _users(rank: Rank) -> list[list[int]]:
    actual: list[list[int]] = [[] for _ in rank]
    for place, op in enumerate(rank):
        for other in op.waits:
            actual[other].append(place)
    return actual
