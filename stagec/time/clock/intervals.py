"""The start and end of each node of a rank: the times of its class, with the microbatch and the
tag that distinguish nodes of one prototype."""

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
    """The nodes of a rank in the order of issue, as columns: node i is `kinds[kind[i]]`, belongs
    to `microbatch[i]` (`NONE` if to no microbatch), has the tag `tag[i]` if it is a message, and
    runs from `start[i]` to `end[i]`, in picoseconds. This includes `launch[i]`, the gap in which a
    computation is launched."""

    kinds: Sequence[OnStreams]
    kind: Ints
    microbatch: Ints
    tag: Ints
    start: Ints
    end: Ints
    launch: Ints

    def spread(self, span: int, step: int) -> NodeTimes:
        """The nodes spread over a step of `step` picoseconds, of which devices alone would take
        `span`. The end of each node is scaled in proportion; its duration stays. That keeps the
        order of ends, since the time between two of them only grows."""
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
    """The times of the nodes of a rank with this program, from those of its class. Raises
    `DiagnosticError` if the step has more picoseconds than 64 bits hold."""
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
    """The name of a stream: `compute`, `collectives over dp`, `copies to host`, `sends over pp
    +1`. Of the two distances along a ring the shorter one is named."""
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
