"""The plans of the classes of a job, joined: each knows which classes send to it, and which ones
its collectives join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from stagec.ir.expr import evaluate
from stagec.program.classes import RankClass
from stagec.program.groups import Channel, GroupAxes
from stagec.program.nodes import Node
from stagec.program.runs import Run
from stagec.time.clock.plan import ClassPlanner, PlannedPiece, never
from stagec.time.clock.shapes import Shape

Coords = Mapping[str, int]
#: The number of a class, and a channel of it.
Way = tuple[int, Channel]


class Joined(NamedTuple):
    """The plan of a class, and the numbers of the classes that it waits for: those that messages of
    a way come from, each with the way that it sends them, and those that a collective joins.

    `shapes` are those of the plan. `computed` says what the compute stream runs: the number of a
    piece and a place in it, and how many nodes do the same in all pieces of the class.
    """

    name: str
    plan: Sequence[PlannedPiece]
    shapes: Sequence[Shape]
    senders: Mapping[Channel, Sequence[Way]]
    members: Mapping[GroupAxes, tuple[int, ...]]
    computed: Sequence[tuple[int, int, int]]


def joined(
    classes: Sequence[RankClass],
    runs: Sequence[Sequence[Run]],
    mesh: Mapping[str, int],
    *,
    overlap: bool = True,
    one_stream: bool = False,
    waits: Callable[[Node], bool] = never,
) -> list[Joined]:
    """The plans of classes that issue these runs; `waits` tells the messages that wait for their
    receivers."""
    coords = [each.coords for each in classes]
    planner = ClassPlanner(overlap=overlap, one_stream=one_stream, waits=waits)
    found: list[Joined] = []
    for each, mine in zip(classes, runs, strict=True):
        groups = {g: tuple(members(each.coords, coords, g, mesh)) for g in each.groups}
        plan = planner.plan(
            mine, frozenset(g for g, numbers in groups.items() if len(numbers) == 1)
        )
        sources = {
            c: [
                (i, c)
                for i in senders(each.coords, coords, c[0], evaluate(c[1], each.env), mesh[c[0]])
            ]
            for c in each.channels
        }
        shapes = [planned.shape for planned in plan]
        found.append(Joined(each.name, plan, shapes, sources, groups, _computed(shapes)))
    return found


def _computed(shapes: Sequence[Shape]) -> list[tuple[int, int, int]]:
    first = dict(zip(reversed(shapes), range(len(shapes) - 1, -1, -1), strict=True))
    at: dict[Hashable, tuple[int, int]] = {}
    counts: Counter[Hashable] = Counter()
    for shape, count in Counter(shapes).items():
        if shape.joins:  # the time of these is what is left of waits for other classes
            continue
        for key, place in shape.computed:
            at.setdefault(key, (first[shape], place))
            counts[key] += count
    return [(*where, counts[key]) for key, where in at.items()]


def senders(mine: Coords, classes: Sequence[Coords], over: str, by: int, size: int) -> list[int]:
    """The classes whose messages along an axis a class at these coordinates receives."""
    wanted = {a: (i - by) % size if a == over else i for a, i in mine.items()}
    return [i for i, other in enumerate(classes) if _alike(wanted, other)]


def members(
    mine: Coords, classes: Sequence[Coords], group: GroupAxes, mesh: Mapping[str, int]
) -> list[int]:
    """The classes that a collective of a class at these coordinates joins."""
    found = [i for i, other in enumerate(classes) if _alike(mine, other, group.axes)]
    if not group.mirrored or group.axes[0] not in mine:
        return found
    (axis,) = group.axes
    pair = {mine[axis], mesh[axis] - 1 - mine[axis]}
    return [i for i in found if classes[i].get(axis, mine[axis]) in pair]


def _alike(one: Coords, other: Coords, but: Sequence[str] = ()) -> bool:
    """Whether ranks at these coordinates may be the same, along all axes but some."""
    return all(other.get(axis, i) == i for axis, i in one.items() if axis not in but)
