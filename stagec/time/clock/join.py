"""Which classes of a job meet: the classes that send to a class, and the members of its
collectives."""

from collections.abc import Mapping, Sequence

from stagec.ir.expr import evaluate
from stagec.program.classes import RankClass
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Program
from stagec.time.clock.graph import ClassIssue

Coords = Mapping[str, int]


def issues_of(
    classes: Sequence[RankClass], programs: Sequence[Program], mesh: Mapping[str, int]
) -> list[ClassIssue]:
    """What classes with these programs issue, and the numbers of the classes that they wait for."""
    coords = [each.coords for each in classes]
    issues: list[ClassIssue] = []
    for each, program in zip(classes, programs, strict=True):
        groups = {g: tuple(members(each.coords, coords, g, mesh)) for g in each.groups}
        sources = {
            c: [
                (i, c)
                for i in senders(each.coords, coords, c[0], evaluate(c[1], each.env), mesh[c[0]])
            ]
            for c in each.channels
        }
        issues.append(ClassIssue(each.name, program, sources, groups))
    return issues


def senders(mine: Coords, classes: Sequence[Coords], over: str, by: int, size: int) -> list[int]:
    """The classes whose messages along an axis a class at these coordinates receives."""
    wanted = {a: (i - by) % size if a == over else i for a, i in mine.items()}
    return [i for i, other in enumerate(classes) if _alike(wanted, other)]


def members(
    mine: Coords, classes: Sequence[Coords], group: GroupAxes, mesh: Mapping[str, int]
) -> list[int]:
    """The classes that a collective of a class at these coordinates joins."""
    alike = [i for i, other in enumerate(classes) if _alike(mine, other, group.axes)]
    if not group.mirrored or group.axes[0] not in mine:
        return alike
    (axis,) = group.axes
    pair = {mine[axis], mesh[axis] - 1 - mine[axis]}
    return [i for i in alike if classes[i].get(axis, mine[axis]) in pair]


def _alike(one: Coords, other: Coords, but: Sequence[str] = ()) -> bool:
    """Whether two sets of coordinates agree along all axes that both have, `but` left out."""
    return all(other.get(axis, i) == i for axis, i in one.items() if axis not in but)
