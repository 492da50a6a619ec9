"""The critical path of a step: the chain of nodes of which each starts when the one before ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from stagec.program.nodes import Node
from stagec.time.clock.replay import At, ClassReplay
from stagec.time.step import StepTime
from stagec.time.streams import COMPUTE, Part


class Link(NamedTuple):
    """A node of the path, of this class, and the picoseconds from the end of the one before to its
    own end. The links of a path add up to the step."""

    owner: ClassReplay
    node: Node
    part: Part
    time: int


def critical_path(step: StepTime) -> Iterator[Link]:
    """The path, from the end of the step to its start."""
    at = _last(step)
    while at is not None:
        at = yield from _within(at)
        cause = cause_of(at)
        before = 0 if cause is None else cause.end
        inside = at.owner.plan[at.piece].shape.steps[at.place]
        yield Link(at.owner, inside.node, inside.part, at.end - before)
        at = cause


def _within(at: At) -> Generator[Link, None, At]:
    """The path through a piece, back to the node that waited for something outside of it."""
    mine, piece, place = at
    entry, steps = mine.entries[piece], mine.plan[piece].shape.steps
    if entry is None:
        return at
    ends, causes = entry.ends, entry.causes
    while (before := causes[place].place) >= 0:
        yield Link(mine, steps[place].node, steps[place].part, ends[place] - ends[before])
        place = before
    return At(mine, piece, place)


def _last(step: StepTime) -> At | None:
    """The node that ends the step."""
    for each in step.classes:
        if each.end == step.picoseconds:
            for end, piece, place in each.streams.values():
                if end == each.end:
                    return At(each, piece, place)
            if each.computed >= 0:
                return At(each, each.computed, _last_computation(each, each.computed))
    return None


def _last_computation(mine: ClassReplay, piece: int) -> int:
    steps = mine.plan[piece].shape.steps
    return next(i for i in range(len(steps) - 1, -1, -1) if steps[i].computes)


def cause_of(at: At) -> At | None:
    """What a node waited for last; None for what starts with the step."""
    mine, piece, place = at
    entry = mine.entries[piece]
    if entry is None:  # it joins classes
        found = mine.causes[piece]
        if found is not None and found.place < 0:
            return found._replace(place=_last_computation(found.owner, found.piece))
        return found
    cause = entry.causes[place]
    if cause.place >= 0:
        return At(mine, piece, cause.place)
    if cause.input >= 0 or cause.stream != COMPUTE:
        source = mine.source(piece, cause)
        return None if source is None else At(mine, *source)
    shape, base = mine.plan[piece].shape, mine.bases[piece]
    for gate in shape.gates:
        number, where = mine.plan[piece].inputs[gate]
        if mine.bases[number] + mine.ends[number][where] == base:
            return At(mine, number, where)
    for number in range(piece - 1, -1, -1):
        if mine.plan[number].shape.computes:
            return At(mine, number, _last_computation(mine, number))
    return None
