"""What `time` means: every node of every rank, one by one.

A node starts when all that it depends on is done and its streams are free; streams take nodes in
the order of issue. A collective starts on all members together, when the last one is there. A
message is sent when it is ready, and received when it has arrived and the receiver is ready. A
computation is slower while collectives that were issued before it run beside it.

This is written to be read, and to be compared with: `stagec.time.replay` gives the same times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from stagec.program.groups import Groups
from stagec.program.nodes import Node, Program
from stagec.time.streams import COMPUTE, Cost, Stream, merged, streams_of, stretched

#: A rank and the place of a node in its program.
Key = tuple[int, int]


@dataclass(frozen=True)
class RankWork:
    """The program of a rank, the cost of each node, and the class of the rank."""

    program: Program
    costs: Sequence[Cost]
    of: Hashable


def clock(
    ranks: Sequence[RankWork],
    groups: Groups,
    peers: Mapping[tuple[int, str, int], int],
    slowdown: int = 0,
    *,
    overlap: bool = True,
) -> dict[Key, tuple[int, int]]:
    """When each node starts and ends, in picoseconds. `peers[rank, over, by]` is the rank whose
    coordinate is `by` more; `slowdown` is how much of a computation's speed a collective takes, in
    1024ths."""
    nodes: dict[Key, Node] = {
        (r, i): node for r, work in enumerate(ranks) for i, node in enumerate(work.program.nodes)
    }
    before: dict[Hashable, set[Hashable]] = {}
    calls: dict[Hashable, list[Key]] = {}
    beside: dict[Key, list[Key]] = {}
    for rank, work in enumerate(ranks):
        last: dict[Stream, Key] = {}
        count: Counter[Hashable] = Counter()
        alone: list[Key] = []
        for i, node in enumerate(work.program.nodes):
            key = rank, i
            waits: set[Hashable] = {(rank, d.id - 1) for d in (*node.deps, *node.after)}
            if node.is_collective:  # not those that are ordered before it for traces alone
                waits = {
                    w
                    for w in waits
                    if not nodes[w].is_collective or nodes[w] in node.deps  # type: ignore[index]
                }
            streams = streams_of(node, overlap=overlap)
            waits |= {last[s] for s in streams if s in last}
            last.update(dict.fromkeys(streams, key))
            if node.is_collective:
                group = groups.of_rank(node.group, rank)
                call = "call", group, count[group]
                count[group] += 1
                calls.setdefault(call, []).append(key)
                before[call] = before.get(call, set()) | waits
                waits = {call}
                members = groups.members[node.group][group - groups.first[node.group]]
                if COMPUTE not in streams and len({ranks[m].of for m in members}) == 1:
                    alone.append(key)
            elif node.is_computation and slowdown:
                beside[key] = list(alone)
                waits |= set(alone)
            elif node.kind == "recv":
                waits.add(("sent", rank, node.over, node.by, node.tag))
            elif node.kind == "send":
                before[("sent", peers[rank, node.over, node.by], node.over, node.by, node.tag)] = {
                    key
                }
            before[key] = waits
    times: dict[Hashable, tuple[int, int]] = {}
    for item in TopologicalSorter(before).static_order():
        start = max((times[w][1] for w in before[item]), default=0)
        if item not in nodes:  # a call, or a message that arrives
            times[item] = start, start
            continue
        rank, i = item  # type: ignore[misc]
        cost = ranks[rank].costs[i]
        busy = merged([times[c] for c in beside.get(item, ())])  # type: ignore[call-overload]
        begun = start + cost.launch
        node = nodes[item]
        received = node.kind == "recv" and node.is_message
        end = begun if received else stretched(begun, cost.time, busy, slowdown)
        times[item] = start, end
    return {key: times[key] for key in nodes}
