"""Chrome's trace events: one file of JSON, which chrome://tracing and ui.perfetto.dev show.

process   a rank
thread    a stream of it
X         a node, from its start to its end, in microseconds with six decimals: exactly
s, f      a message, from where it is sent to where it is received
C         bytes that a rank holds
"""

import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from stagec.formats.base import TraceJob
from stagec.formats.timeline.ranks import (
    ShownRank,
    Timeline,
    TimelineFormat,
    joined,
    microseconds,
    streams_in,
)
from stagec.program.nodes import Ints, Node
from stagec.time.clock.graph import OnStreams
from stagec.time.clock.intervals import NONE, stream_name, title_of
from stagec.time.streams import Stream


@dataclass(frozen=True)
class ChromeFormat(TimelineFormat):
    """Chrome's trace events: one file with the chosen ranks."""

    name: ClassVar[str] = "chrome"
    node_bytes: ClassVar[int] = 250

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[tuple[str, Iterable[bytes]]]:
        yield f"{job.name}.trace.json", chrome_trace(self.timeline(job, ranks))


def chrome_trace(timeline: Timeline) -> Iterator[bytes]:
    """The bytes of a trace, in parts."""
    return joined(_Writer(timeline).lines())


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._flows: dict[Hashable, int] = {}
        self._bodies: dict[int, str] = {}

    def lines(self) -> Iterator[str]:
        yield '{"displayTimeUnit": "ns", "traceEvents": [\n'
        separator = ""
        for each in self._timeline.traces():
            for event in self._rank(each):
                yield separator + event
                separator = ",\n"
        yield "\n]}\n"

    def _rank(self, each: ShownRank) -> Iterator[str]:
        rank, streams = each.rank, streams_in(each.times)
        threads = {stream: number for number, stream in enumerate(streams)}
        yield _about(rank, "process_name", name=f"rank {rank} ({each.name})")
        yield _about(rank, "process_sort_index", sort_index=rank)
        for stream, number in threads.items():
            name = stream_name(stream, self._timeline.mesh(self._timeline.chosen[rank]))
            yield _about(rank, "thread_name", number, name=name)
            yield _about(rank, "thread_sort_index", number, sort_index=number)
        for step, microbatch, tag, start, end, _ in each.times.rows():
            yield from self._node(rank, step, microbatch, tag, (start, end), threads)
        if each.memory is not None:
            for time, size in zip(
                each.memory.time.tolist(), each.memory.bytes.tolist(), strict=True
            ):
                yield (
                    f'{{"ph": "C", "name": "memory", "pid": {rank}, "ts": {microseconds(time)}, '
                    f'"args": {{"bytes": {size}}}}}'
                )

    def _node(
        self,
        rank: int,
        step: OnStreams,
        microbatch: int,
        tag: int,
        when: tuple[int, int],
        threads: dict[Stream, int],
    ) -> Iterator[str]:
        body, (start, end) = self._body(step), when
        of = "" if microbatch == NONE else f', "microbatch": {microbatch}'
        for stream in step.streams:
            place = f'"pid": {rank}, "tid": {threads[stream]}'
            times = f'"ts": {microseconds(start)}, "dur": {microseconds(end - start)}'
            yield f'{{"ph": "X", {place}, {times}, {body}{of}}}}}'
            if step.node.is_message:
                yield from self._flow(rank, step.node, tag, place, when)

    def _body(self, step: OnStreams) -> str:
        """The part of an event that is the same for all nodes of a prototype: name, category and
        arguments, whose object is not closed."""
        body = self._bodies.get(id(step))
        if body is None:
            args = json.dumps(arguments(step.node) | {"counts as": step.part})[:-1]
            name, phase = json.dumps(title_of(step.node.name)), json.dumps(step.node.phase)
            body = self._bodies[id(step)] = f'"name": {name}, "cat": {phase}, "args": {args}'
        return body

    def _flow(
        self, rank: int, node: Node, tag: int, place: str, when: tuple[int, int]
    ) -> Iterator[str]:
        """The event for one end of a message, if the other end is shown too."""
        message = self._timeline.message(node, rank, tag)
        if message is None:
            return
        number = self._flows.setdefault(message, len(self._flows))
        what = f'"id": {number}, "name": "message", "cat": "message", {place}'
        if node.kind == "send":
            yield f'{{"ph": "s", {what}, "ts": {microseconds(when[0])}}}'
        else:
            yield f'{{"ph": "f", "bp": "e", {what}, "ts": {microseconds(when[1])}}}'


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node's event: its op, kernel, bytes and FLOPs."""
    args: dict[str, Any] = {"op": node.kind}
    if node.kernel is not None:
        args["kernel"] = str(node.kernel)
    args |= {n: size for n, size in (("bytes", node.size), ("flops", node.flops)) if size}
    return args


def _about(rank: int, what: str, thread: int | None = None, **args: Any) -> str:
    on = {} if thread is None else {"tid": thread}
    return json.dumps({"ph": "M", "name": what, "pid": rank, **on, "args": args})


CHROME = ChromeFormat()
