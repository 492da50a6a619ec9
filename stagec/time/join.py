"""Replays of the classes of a job, joined: each knows which classes send to it, and which ones its
collectives join."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from stagec.program.classes import RankClass
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Node
from stagec.program.runs import Run
from stagec.time.plan import Planner
from stagec.time.replay import ClassReplay
from stagec.time.streams import Cost

Coords = Mapping[str, int]


def joined(
    classes: Sequence[RankClass],
    runs: Sequence[Sequence[Run]],
    mesh: Mapping[str, int],
    costs: Sequence[tuple[Hashable, Callable[[Node], Cost]]],
    *,
    overlap: bool = True,
) -> list[ClassReplay]:
    """The replays of classes that issue these runs. `costs` are those of the nodes of each class,
    with what tells classes apart whose nodes do not cost the same."""
    coords = [each.coords for each in classes]
    planner = Planner(overlap=overlap)
    found: list[ClassReplay] = []
    for each, mine, (key, cost) in zip(classes, runs, costs, strict=True):
        groups = {g: members(each.coords, coords, g, mesh) for g in each.groups}
        alone = frozenset(g for g, numbers in groups.items() if len(numbers) == 1)

        def joins(node: Node, alone: frozenset[GroupAxes] = alone) -> bool:
            return (
                node.kind == "recv"
                if node.is_message
                else node.is_collective and node.group not in alone
            )

        plan = planner.plan(mine, cost, joins, (key, alone))
        found.append(ClassReplay(each.name, each.coords, plan))
    for each, made in zip(classes, found, strict=True):
        for group in each.groups:
            numbers = members(each.coords, coords, group, mesh)
            made.members[group] = tuple(found[i] for i in numbers)
        for over, by, _ in each.channels:
            numbers = senders(each.coords, coords, over, by, mesh[over])
            made.senders[over, by % mesh[over]] = tuple(found[i] for i in numbers)
    return found


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
