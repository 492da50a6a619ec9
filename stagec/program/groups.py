"""Communicator groups: the ranks of each group, and its identifier in the output files. Peers of
messages: neighbours along an axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagec.ir.core import Operation
from stagec.ir.expr import Expr

Ints = npt.NDArray[np.int64]
#: A stream of messages: the mesh axis or pod, the coordinate of the receiver minus that of the
#: sender, and the number of the stream among several.
Channel = tuple[str, Expr, int]
_MIRROR = ":mirror"


class GroupAxes(NamedTuple):
    """The ranks of a collective: those that differ along `axes` only, major axis first, or, if
    `mirrored`, the pairs of coordinates i and n-1-i of one axis. Without axes there is no group."""

    axes: tuple[str, ...] = ()
    mirrored: bool = False

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def words(self) -> list[str]:
        """The form in reports and archives: `["dp", "tp"]`, `["pp:mirror"]`."""
        return [a + _MIRROR if self.mirrored else a for a in self.axes]

    @classmethod
    def of_words(cls, words: Iterable[str]) -> GroupAxes:
        """The inverse of `words`. Raises ValueError if only some of the axes are mirrored."""
        given = list(words)
        axes = tuple(w.removesuffix(_MIRROR) for w in given)
        group = cls(axes, bool(given) and given[0].endswith(_MIRROR))
        if group.words != given:
            raise ValueError(f"a group over {', '.join(given)}")
        return group

    def size(self, mesh: Mapping[str, int]) -> int:
        """The number of ranks in each group."""
        return 2 if self.mirrored else prod(mesh[a] for a in self.axes)


#: The value for operations that are not collectives.
NO_GROUP = GroupAxes()


def group_axes(op: Operation) -> GroupAxes:
    """The ranks of a lowered collective."""
    return GroupAxes(op.names("group"), op.text("pairs") == "mirrored")


def channel_of(op: Operation) -> Channel:
    """The stream of messages that a lowered send or receive belongs to. Between pods, the name of
    the other pod replaces the axis, and there is only one stream."""
    return op.text("pod") or op.text("over"), op.expr("by"), op.integer("channel", 0)


def crosses_pods(op: Operation | None) -> bool:
    """Whether an operation is a send or receive between pods."""
    return op is not None and "pod" in op.attrs


def tag_step(op: Operation | None) -> int:
    """The difference of the tags of a message between pods in successive microbatches: the number
    of layers that are transferred, for each part of the batch in a microbatch. 0 for other
    operations."""
    if op is None or not crosses_pods(op):
        return 0
    return op.integer("turns", 1) * op.integer("streams")


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a job. `members[axes][i]` are the ranks of group `first[axes] + i`, in ring
    order; `number[axes]` has the identifier of each rank's group, 0 for a rank without one."""

    ranks: int
    first: Mapping[GroupAxes, int]
    members: Mapping[GroupAxes, Ints]
    number: Mapping[GroupAxes, Ints]

    def of_rank(self, axes: GroupAxes, rank: int) -> int:
        """The identifier of the rank's group over these axes."""
        return int(self.number[axes][rank])

    def row(self, axes: GroupAxes, rank: int) -> Ints:
        """The ranks of the rank's group over these axes."""
        row: Ints = self.members[axes][self.number[axes][rank] - self.first[axes]]
        return row

    def moved(self, start: int, first: int, ranks: int) -> Groups:
        """The same groups as part of a job of `ranks` ranks: `start` is added to their ranks,
        `first` to their identifiers."""
        before = np.zeros(start, dtype=np.int64)
        return Groups(
            ranks,
            {axes: number + first for axes, number in self.first.items()},
            {axes: rows + start for axes, rows in self.members.items()},
            {
                axes: np.concatenate([before, np.where(ids > 0, ids + first, 0)])
                for axes, ids in self.number.items()
            },
        )

    @property
    def ids(self) -> range:
        """All identifiers."""
        return range(1, 1 + sum(map(len, self.members.values())))

    def table(self) -> dict[str, list[int]]:
        """The content of the groups file: the ranks of each identifier."""
        return {
            str(self.first[axes] + i): row.tolist()
            for axes, rows in self.members.items()
            for i, row in enumerate(rows)
        }


def coordinate(mesh: Mapping[str, int], axis: str, ranks: Ints) -> Ints:
    """The coordinate of each rank along an axis."""
    return ranks // _stride(mesh, axis) % mesh[axis]


def neighbours(mesh: Mapping[str, int], axis: str, by: int, ranks: Ints) -> Ints:
    """For each rank, the rank whose coordinate along `axis` is larger by `by`, modulo the size of
    the axis."""
    here = coordinate(mesh, axis, ranks)
    return ranks + ((here + by) % mesh[axis] - here) * _stride(mesh, axis)


def _stride(mesh: Mapping[str, int], axis: str) -> int:
    names = list(mesh)
    faster = names[names.index(axis) + 1 :]
    return prod(mesh[n] for n in faster)


def number_groups(
    mesh: Mapping[str, int], used: Iterable[tuple[Iterable[GroupAxes], Ints]]
) -> Groups:
    """Number the groups that ranks use, from 1: by axes in order of use, then by first rank.

    `used` has for each class its axes in order of use, and its ranks. Ranks number the mesh
    row-major, last axis fastest; within a group, the axes count major first.
    """
    users: dict[GroupAxes, list[Ints]] = {}
    for each, ranks in used:
        for axes in each:
            users.setdefault(axes, []).append(ranks)
    names = list(mesh)
    grid = np.arange(int(np.prod([mesh[n] for n in names], dtype=np.int64)), dtype=np.int64)
    shaped = grid.reshape([mesh[n] for n in names])
    first: dict[GroupAxes, int] = {}
    members: dict[GroupAxes, Ints] = {}
    number: dict[GroupAxes, Ints] = {}
    start = 1
    for axes, parts in users.items():
        inside = np.zeros(grid.size, dtype=bool)
        inside[np.concatenate(parts)] = True
        rows = _rows(names, shaped, axes)
        rows = rows[inside[rows].any(axis=1)]
        first[axes], members[axes] = start, rows
        ids = np.zeros(grid.size, dtype=np.int64)
        ids[rows.reshape(-1)] = np.repeat(np.arange(start, start + len(rows)), rows.shape[1])
        number[axes] = ids
        start += len(rows)
    return Groups(grid.size, first, members, number)


def _rows(names: list[str], shaped: Ints, axes: GroupAxes) -> Ints:
    """The ranks of each group over the axes: a row per group."""
    rest = [i for i, n in enumerate(names) if n not in axes.axes]
    rows = shaped.transpose([*rest, *(names.index(a) for a in axes.axes)])
    rows = rows.reshape(-1, int(np.prod(rows.shape[len(rest) :], dtype=np.int64)))
    if axes.mirrored:
        half = rows.shape[1] // 2
        pairs = np.stack([rows[:, :half], rows[:, ::-1][:, :half]], axis=2)
        rows = np.sort(pairs.reshape(-1, 2), axis=1)
        rows = rows[np.argsort(rows[:, 0])]
    return rows
