"""When each node of a rank runs: the times of its class, with what distinguishes its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Program, marker_of
from stagec.support.diagnostics import error
from stagec.time.clock.graph import OnStreams
from stagec.time.clock.times import ClassTimes
from stagec.time.streams import MOST, PICOSECONDS, Stream

#: Stands for no microbatch.
NONE = -1


class NodeTimes(NamedTuple):
    """The nodes of a rank in the order of issue, as columns: node i is `kinds[kind[i]]`, for
    `microbatch[i]` (`NONE` if for none), a message with the tag `tag[i]`, and runs from `start[i]`
    to `end[i]`, in picoseconds. The gap in which a computation is launched, `launch[i]`, is in
    it."""

    kinds: Sequence[OnStreams]
    kind: Ints
    microbatch: Ints
    tag: Ints
    start: Ints
    end: Ints
    launch: Ints

    def spread(self, span: int, step: int) -> NodeTimes:
        """The nodes over a step that hosts hold up, where devices would take `span`: each ends as
        late in proportion, and takes as long as it does. That keeps all orders, since the time
        between two ends only grows, and all that end together still do."""
        if span >= step:
            return self
        end = (self.end.astype(object) * step // span).astype(np.int64)  # more than 64 bits
        return self._replace(start=end - (self.end - self.start), end=end)

    def rows(self) -> Iterator[NodeRow]:
        """The nodes one by one."""
        lists: list[list[int]] = [column.tolist() for column in self[1:]]
        for number, *others in zip(*lists, strict=True):
            yield NodeRow(self.kinds[number], *others)


class NodeRow(NamedTuple):
    """A node of `NodeTimes`."""

    placed: OnStreams
    microbatch: int
    tag: int
    start: int
    end: int
    launch: int


def node_times(program: Program, each: ClassTimes) -> NodeTimes:
    """When the nodes of one rank of a class run, whose program this is. Raises `DiagnosticError`
    for more picoseconds than numpy counts."""
    if each.end > MOST:
        days = each.end / PICOSECONDS / 86400
        raise error(
            f"a step of {days:,.0f} days is too long to show node by node",
            remedy="check the figures of the machine: one is too small or too large",
        )
    marked = np.array([bool(marker_of(n.name)) for n in program.prototypes], dtype=bool)
    microbatch = np.where(marked[program.prototype], program.microbatch, NONE)
    times = (column.astype(np.int64) for column in (each.start, each.ends, each.launch))
    kinds = each.nodes.prototypes
    return NodeTimes(kinds, program.prototype, microbatch, program.tag, *times)


# -- names -----------------------------------------------------------------------------------------


def stream_name(stream: Stream, mesh: Mapping[str, int]) -> str:
    """`compute`, `collectives over dp`, `copies to host`, `sends over pp +1`; a way round the ring
    is named by the shorter distance."""
    match stream:
        case "group", GroupAxes() as group:
            return f"collectives over {','.join(group.words)}"
        case "copy", str(to):
            return f"copies to {to}"
        case str(kind), str(which):
            return f"{kind}s, {which}".replace("recvs", "receives")
        case str(kind), str(over), int(by):
            by = by % mesh[over]
            way = by if 2 * by <= mesh[over] else by - mesh[over]
            return f"{kind}s over {over} {way:+d}".replace("recvs", "receives")
        case _:
            return str(stream)


def title_of(name: str) -> str:
    """The name of a node without its microbatch: `forward/L0/q`."""
    mark = marker_of(name)
    return name.replace(f"mb{mark}/", "", 1) if mark else name
