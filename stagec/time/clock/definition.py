"""The definition of the time of a step: every node of every rank, one by one.

A node starts when all its dependencies are done and its streams are free; streams run nodes in the
order of issue. A collective starts on all members together, when the last one has reached it. A
message is sent when it is ready, and received when it has arrived and the receiver is ready; with
a handshake it is sent when the sender has heard that the receiver is ready. A message from another
pod arrives at all ranks of a class when it arrives at the last of them. A computation is slower
while collectives that were issued before it run at the same time.

This module is a specification for readers and tests: `loop` gives the same times faster.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import cast

from stagec.program.groups import Groups, crosses_pods
from stagec.program.nodes import Node, Program
from stagec.time.streams import COMPUTE, Cost, Stream, merged, streams_of, stretched

#: A rank and the place of a node in its program.
Key = tuple[int, int]


@dataclass(frozen=True)
class RankWork:
    """The program of a rank, the cost of each node, the class of the rank, and its pod."""

    program: Program
    costs: Sequence[Cost]
    of: Hashable
    pod: str = ""


def clock(
    ranks: Sequence[RankWork],
    groups: Mapping[str, Groups],
    peers: Mapping[tuple[int, str, int], int],
    slowdown: int = 0,
    *,
    overlap: bool = True,
    one_stream: bool = False,
) -> dict[Key, tuple[int, int]]:
    """The start and end of each node, in picoseconds.

    `groups` has the communicator groups of each pod. `peers[rank, over, by]` is the rank whose
    coordinate along the axis `over` is larger by `by`; where `over` is a pod, it is the rank there
    that message `by` goes to or comes from. `slowdown` is how much of a computation's speed a
    collective takes, in 1024ths.
    """
    return _Clock(ranks, groups, peers, slowdown, overlap=overlap, one_stream=one_stream).times()


class _Clock:
    """Collects what each node waits for, then computes times in a topological order."""

    def __init__(
        self,
        ranks: Sequence[RankWork],
        groups: Mapping[str, Groups],
        peers: Mapping[tuple[int, str, int], int],
        slowdown: int,
        *,
        overlap: bool,
        one_stream: bool,
    ) -> None:
        self._ranks, self._groups, self._peers = ranks, groups, peers
        self._slowdown, self._overlap, self._one_stream = slowdown, overlap, one_stream
        self._waits: dict[Hashable, set[Hashable]] = {}
        self._members: dict[Hashable, list[Key]] = {}
        self._messages: set[Hashable] = set()
        self._heard: dict[Hashable, int] = {}
        self._beside: dict[Hashable, list[Hashable]] = {}

    def times(self) -> dict[Key, tuple[int, int]]:
        """The start and end of each node."""
        for rank in range(len(self._ranks)):
            self._rank(rank)
        times: dict[Hashable, tuple[int, int]] = {}
        known_before = {t: {*w, *self._beside.get(t, ())} for t, w in self._waits.items()}
        for thing in TopologicalSorter(known_before).static_order():
            start = max((times[w][1] for w in self._waits[thing]), default=0)
            times[thing] = start, self._end(thing, start, times)
        return {
            (r, i): times[r, i]
            for r, work in enumerate(self._ranks)
            for i in range(len(work.costs))
        }

    def _rank(self, rank: int) -> None:
        """Add what the nodes of a rank wait for. Calls and messages are events of their own: all
        members of a collective wait for the call, which waits for all that they wait for."""
        last: dict[Stream, Key] = {}
        count: Counter[int] = Counter()
        mine: list[Hashable] = []
        for i, node in enumerate(self._ranks[rank].program.nodes):
            key = rank, i
            waits: set[Hashable] = {(rank, d.id - 1) for d in node.deps}
            # traces order collectives of different communicators: here they have separate streams
            ordered = (a for a in node.after if not (node.is_collective and a.is_collective))
            waits |= {(rank, a.id - 1) for a in ordered}
            own = not node.is_collective or self._one_class(rank, node)
            streams = streams_of(
                node, overlap=self._overlap or not own, one_stream=self._one_stream
            )
            waits |= {last[s] for s in streams if s in last}
            last.update(dict.fromkeys(streams, key))
            if node.is_collective:
                groups = self._groups[self._ranks[rank].pod]
                group = groups.of_rank(node.group, rank)
                call = "call", group, count[group]
                count[group] += 1
                self._members.setdefault(call, []).append(key)
                self._waits.setdefault(call, set()).update(waits)
                waits = {call}
                if own and COMPUTE not in streams:
                    mine.append(call)
            elif node.is_computation and self._slowdown:
                self._beside[key] = list(mine)
            elif node.is_message:
                self._message(key, node, waits)
            self._waits[key] = waits

    def _message(self, key: Key, node: Node, waits: set[Hashable]) -> None:
        rank, way = key[0], (node.over, node.by)
        crosses = crosses_pods(node.op)
        ranks = self._alike(rank) if crosses else [rank]
        handshake = self._ranks[rank].costs[key[1]].handshake
        if node.kind == "recv":
            # that a receiver is ready is an event of its own, for which the sender waits
            ready = "ready", self._peers[rank, *way] if crosses else way, rank, node.tag
            self._waits[ready] = set(waits)
            self._heard[ready] = handshake or 0
            senders = ((self._peers[r, *way], r) for r in ranks) if crosses else ((way, rank),)
            waits.update(("message", *pair, node.tag) for pair in senders)
        else:
            message = "message", rank if crosses else way, self._peers[rank, *way], node.tag
            self._messages.add(message)
            self._waits.setdefault(message, set()).add(key)
            if handshake is not None:
                to = ((r if crosses else way, self._peers[r, *way]) for r in ranks)
                waits.update(("ready", *pair, node.tag) for pair in to if pair[1] >= 0)

    def _alike(self, rank: int) -> Sequence[int]:
        """The ranks of the same class."""
        of = self._ranks[rank].of
        return [r for r, work in enumerate(self._ranks) if work.of == of]

    def _one_class(self, rank: int, node: Node) -> bool:
        """Whether a collective joins ranks of one class only."""
        groups = self._groups[self._ranks[rank].pod]
        number = groups.of_rank(node.group, rank) - groups.first[node.group]
        members: list[int] = groups.members[node.group][number].tolist()
        return len({self._ranks[m].of for m in members}) == 1

    def _end(self, thing: Hashable, start: int, times: Mapping[Hashable, tuple[int, int]]) -> int:
        if thing in self._members:
            return start + max(self._ranks[r].costs[i].time for r, i in self._members[thing])
        if thing in self._messages:
            return start
        if thing in self._heard:
            return start + self._heard[thing]
        rank, i = cast("Key", thing)
        node, cost = self._ranks[rank].program.nodes[i], self._ranks[rank].costs[i]
        if node.is_collective or node.kind == "recv":  # ends with the call, or with the message
            return start
        busy = merged([times[c] for c in self._beside.get((rank, i), ())])
        return stretched(start + cost.launch, cost.time, busy, self._slowdown)
