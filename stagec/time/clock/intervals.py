"""When each node of a rank runs, and what its compute stream waits for in between: the replay of
its class, written out.

    piece at 900, replayed as 0..40, 40..90      nodes at 900..940 and 940..990
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from stagec.program.groups import GroupAxes
from stagec.program.nodes import MICROBATCH, Ints, marker_of
from stagec.program.runs import Run
from stagec.support.diagnostics import error
from stagec.time.clock.pieces import Cause, Entry
from stagec.time.clock.replay import ClassReplay
from stagec.time.clock.shapes import Shape, ShapeNode
from stagec.time.streams import BUBBLE, MOST, PICOSECONDS, Part, Stream

#: Stands for no microbatch.
NONE = -1


class NodeTimes(NamedTuple):
    """The nodes of a rank in the order of issue, as columns: node i is `steps[step[i]]`, for
    `microbatch[i]` (`NONE` if for none), a message with the tag `tag[i]`, and runs from `start[i]`
    to `end[i]`, in picoseconds. The gap in which a computation is launched, `launch[i]`, is in
    it."""

    steps: Sequence[ShapeNode]
    step: Ints
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
        columns = self[1:]
        lists: list[list[int]] = [column.tolist() for column in columns]
        for number, *others in zip(*lists, strict=True):
            yield NodeRow(self.steps[number], *others)


class NodeRow(NamedTuple):
    """A node of `NodeTimes`."""

    step: ShapeNode
    microbatch: int
    tag: int
    start: int
    end: int
    launch: int


class Wait(NamedTuple):
    """Picoseconds in which the compute stream of a rank has nothing to do, and what they count
    as."""

    start: int
    end: int
    part: Part


def occurrences(runs: Sequence[Run], each: ClassReplay) -> Iterator[tuple[int, slice, Run]]:
    """The pieces of a class by number, each with the places in it of a run: a piece is a part of
    one run, or consists of several."""
    number, first = 0, 0
    for run in runs:
        left = run.kind.last - run.kind.first
        while left > 0:
            whole = len(each.plan[number].shape.steps)
            last = min(first + left, whole)
            yield number, slice(first, last), run
            left -= last - first
            number, first = (number + 1, 0) if last == whole else (number, last)


def node_times(runs: Sequence[Run], each: ClassReplay) -> NodeTimes:
    """When the nodes of one rank of a class run, that issues these runs. Raises `DiagnosticError`
    for more picoseconds than numpy counts."""
    if each.end > MOST:
        days = each.end / PICOSECONDS / 86400
        raise error(
            f"a step of {days:,.0f} days is too long to show node by node",
            remedy="look for a figure of the machine that is too small or too large",
        )
    steps: list[ShapeNode] = []
    firsts: dict[Shape, int] = {}
    rows: list[tuple[Ints, ...]] = []
    slots = cache(_slots)
    for number, inside, run in occurrences(runs, each):
        shape, entry = each.plan[number].shape, each.entries[number]
        if shape not in firsts:
            firsts[shape] = len(steps)
            steps += shape.steps
        places = np.arange(inside.start, inside.stop, dtype=np.int64)
        numbers = run.instance.microbatches if run.instance is not None else ()
        microbatch = np.array([*numbers, NONE], dtype=np.int64)[slots(shape)[inside]]
        begun = places * 0 if entry is None else np.array(entry.starts[inside], dtype=np.int64)
        ended = np.array(each.ends[number][inside], dtype=np.int64)
        base = each.bases[number]
        gaps = np.array([cost.launch for cost in each.pieces[number].costs], dtype=np.int64)
        what = firsts[shape] + places, microbatch, _tags(shape.steps[inside], run)
        rows.append((*what, base + begun, base + ended, gaps[inside]))
    if not rows:
        return NodeTimes((), *(np.zeros(0, dtype=np.int64) for _ in range(6)))
    return NodeTimes(steps, *(np.concatenate(column) for column in zip(*rows, strict=True)))


def _slots(shape: Shape) -> Ints:
    """Of each node, which of the microbatches of its run it is for; the last of them for none."""
    marks = [marker_of(step.node.name) for step in shape.steps]
    return np.array([MICROBATCH.index(m) if m else -1 for m in marks], dtype=np.int64)


def _tags(steps: Sequence[ShapeNode], run: Run) -> Ints:
    tags = [run.tag(step.node) if step.node.is_message else 0 for step in steps]
    return np.array(tags, dtype=np.int64)


# -- waits -----------------------------------------------------------------------------------------


def waits(each: ClassReplay, step: int, *, inside: bool = True) -> list[Wait]:
    """The times in which the compute stream of a class waits in a step that ends at `step`, but for
    `inner_waits` if not `inside`. With what its nodes take they add up to `ClassReplay.parts`:
    where a class waits for others it first idles, then the communication itself takes its time."""
    found: list[Wait] = []
    gaps = cache(_gaps)
    now = 0
    for number, planned in enumerate(each.plan):
        shape, entry, base = planned.shape, each.entries[number], each.bases[number]
        if entry is None:  # it joins classes
            if shape.computes:
                found.append(Wait(now, base, BUBBLE))
                now = base + each.ends[number][0]
            continue
        if not shape.computes:
            continue
        if base > now:
            found += _spent(each, *_latest(each, number, shape.gates), now, base)
        for start, end, why in gaps(shape, entry):
            if not isinstance(why, Cause):
                found += [Wait(base + start, base + end, why)] if inside else []
            elif (source := each.source(number, why)) is not None:
                found += _spent(each, *source, base + start, base + end)
        now = base + entry.compute
    last = max(each.streams.values(), key=lambda s: s[0], default=None)
    if last is not None and last[0] > now:
        found += _spent(each, *last[1:], now, last[0])
        now = last[0]
    found.append(Wait(now, step, BUBBLE))
    return sorted(wait for wait in found if wait.end > wait.start)


def inner_waits(shape: Shape, entry: Entry) -> list[Wait]:
    """The waits of a piece for what is in it, whenever it runs in this way, relative to its
    base."""
    gaps = _gaps(shape, entry)
    return [Wait(start, end, why) for start, end, why in gaps if not isinstance(why, Cause)]


def _latest(each: ClassReplay, number: int, gates: Sequence[int]) -> tuple[int, int]:
    """The input that is there last of those that a piece starts with."""
    inputs = [each.plan[number].inputs[gate] for gate in gates]
    return max(inputs, key=lambda at: each.bases[at[0]] + each.ends[at[0]][at[1]])


def _spent(each: ClassReplay, piece: int, place: int, start: int, end: int) -> Iterator[Wait]:
    """A wait for a node, as it is accounted for."""
    for part, time in each.spent(piece, place, end - start):
        yield Wait(end - time, end, part)
        end -= time


def _gaps(shape: Shape, entry: Entry) -> list[tuple[int, int, Part | Cause]]:
    """Where the compute stream waits in a piece: for what runs in the piece meanwhile, or for what
    comes from before it."""
    found: list[tuple[int, int, Part | Cause]] = []
    free = 0
    for place, step in enumerate(shape.steps):
        if not step.computes:
            continue
        until, cause = entry.starts[place], entry.causes[place]
        while until > free:
            if cause.place < 0:
                found.append((free, until, cause))
                break
            begun = entry.starts[cause.place]
            found.append((max(begun, free), until, shape.steps[cause.place].part))
            until, cause = begun, entry.causes[cause.place]
        free = entry.ends[place]
    return found


# -- names -----------------------------------------------------------------------------------------


def stream_name(stream: Stream, mesh: Mapping[str, int]) -> str:
    """`compute`, `collectives over dp`, `copies to host`, `sends over pp +1`; a way round the ring
    is told by the shorter distance."""
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
