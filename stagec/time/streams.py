"""The streams of a rank: what runs one after the other, and what time is accounted as.

A rank computes on one stream. Each communicator, each direction of copies, and sends to and
receives from each neighbour have a stream of their own, beside it; so have all messages to another
pod, which share the link of the rank. A machine may say that its collectives, sends (those to other
pods too) and copies share one stream. A blocking collective is on the stream of its communicator
and on that of the computations.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

from stagec.program.groups import crosses_pods
from stagec.program.nodes import Node

#: Clocks count picoseconds: so many in a second.
PICOSECONDS: Final = 10**12
#: Up to here times and what is added to them are surely whole numbers of numpy.
MOST: Final = 2**62
#: The stream of computations.
COMPUTE: Final = "compute"
#: The stream of all collectives, sends and copies, where they share one.
SHARED: Final = "shared"
Stream = Hashable
#: What time on the compute stream goes to, see `part_of`.
Part = str
BUBBLE: Final = "bubble"
COPIES: Final = "host copies"
LAUNCH: Final = "launch gaps"
INTERFERENCE: Final = "interference"
OPTIMIZER: Final = "optimizer"
SCHEDULER: Final = "scheduler"
#: Parts by the kind of a kernel.
KERNEL_PARTS: Final[Mapping[str, Part]] = {
    "matmul": "matrix products",
    "attention": "attention",
    "attention_backward": "attention",
    "memory": "element-wise",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Picoseconds of a node: of its kernel, call or transfer, and of the gap before it, in which
    it is launched. A message with a `handshake` waits for its receiver, which it hears of so much
    later."""

    time: int
    launch: int = 0
    handshake: int | None = None


def streams_of(node: Node, *, overlap: bool = True, one_stream: bool = False) -> tuple[Stream, ...]:
    """The streams that a node is on. Without overlap all collectives are blocking; with one stream
    collectives, sends and copies share it."""
    if node.is_copy:
        return (SHARED,) if one_stream else (("copy", node.to),)
    if node.is_message:
        if one_stream and node.kind == "send":
            return (SHARED,)
        crosses = crosses_pods(node.op)
        return ((node.kind, node.over) if crosses else (node.kind, node.over, node.by),)
    if node.is_computation:
        return (COMPUTE,)
    own: Stream = SHARED if one_stream else ("group", node.group)
    return (COMPUTE, own) if node.blocking or not overlap else (own,)


def part_of(node: Node) -> Part:
    """What the time of a node counts as where the compute stream runs it or waits for it."""
    if node.is_copy:
        return COPIES
    if node.is_message:
        return f"exposed {node.over} message"
    if node.is_collective:
        return f"exposed {','.join(node.group.words)} {node.kind}"
    if node.phase == "optimizer":
        return OPTIMIZER
    return KERNEL_PARTS["memory" if node.kernel is None else node.kernel.kind]


def stretched(start: int, work: int, busy: list[tuple[int, int]], slowdown: int) -> int:
    """The end of a computation that starts now and takes `work`, of which collectives that run at
    the times `busy` (sorted and disjoint) take `slowdown` 1024ths."""
    if not slowdown:
        return start + work
    now, left = start, work * 1024
    for first, last in busy:
        if last <= now:
            continue
        if first > now:
            free = (first - now) * 1024
            if left <= free:
                break
            now, left = first, left - free
        rate = 1024 - slowdown
        if left <= (last - now) * rate:
            return now + -(-left // rate)
        now, left = last, left - (last - now) * rate
    return now + -(-left // 1024)


def merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times as sorted, disjoint intervals."""
    merged_spans: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if merged_spans and first <= merged_spans[-1][1]:
            merged_spans[-1] = merged_spans[-1][0], max(merged_spans[-1][1], last)
        elif last > first:
            merged_spans.append((first, last))
    return merged_spans
