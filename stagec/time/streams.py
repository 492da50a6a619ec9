"""The streams of a rank, on which nodes run one after the other, and the categories of time.

A rank computes on one stream. Each communicator, each direction of copies, and sends to and
receives from each neighbour have a stream of their own; so have all messages to another pod, which
share the link of the rank. A machine may state that its collectives, sends (also those to other
pods) and copies share one stream. A blocking collective occupies the stream of its communicator
and the compute stream.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

from stagec.program.groups import crosses_pods
from stagec.program.nodes import Node

#: Picoseconds in a second; clocks count picoseconds.
PICOSECONDS: Final = 10**12
#: Times up to this one can be added without overflow of 64 bits.
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
TRAINER: Final = "host between steps"
#: Parts by the kind of a kernel.
KERNEL_PARTS: Final[Mapping[str, Part]] = {
    "matmul": "matrix products",
    "attention": "attention",
    "attention_backward": "attention",
    "memory": "element-wise",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Picoseconds of a node: `time` of its kernel, call or transfer, and `launch` of the gap before
    it. A message with a `handshake` waits until its sender has heard, `handshake` picoseconds
    later, that the receiver is ready."""

    time: int
    launch: int = 0
    handshake: int | None = None


def streams_of(node: Node, *, overlap: bool = True, one_stream: bool = False) -> tuple[Stream, ...]:
    """The streams that a node occupies. Without `overlap` all collectives are blocking; with
    `one_stream` collectives, sends and copies share a stream."""
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
    """The category of the time in which the compute stream runs a node or waits for it."""
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
    """The end of a computation that starts at `start`, takes `work` picoseconds at full speed, and
    loses `slowdown` 1024ths of its speed during the intervals `busy` (sorted and disjoint)."""
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
