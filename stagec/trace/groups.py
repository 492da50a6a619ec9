"""Communicator groups: which ranks talk over which axes, and the numbers that consumers know them
by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a job. `members[axes][i]` are the ranks of group `first[axes] + i`, in ring
    order."""

    ranks: int
    first: Mapping[Axes, int]
    members: Mapping[Axes, npt.NDArray[np.int64]]
    number: Mapping[Axes, npt.NDArray[np.int64]]

    def of_rank(self, axes: Axes, rank: int) -> int:
        """The identifier of the rank's group over these axes."""
        return int(self.number[axes][rank])

    def table(self) -> dict[str, list[int]]:
        """The content of the groups file: identifier to ranks."""
        return {
            str(self.first[axes] + i): row.tolist()
            for axes, rows in self.members.items()
            for i, row in enumerate(rows)
        }


def number_groups(mesh: Mapping[str, int], used: Iterable[Axes]) -> Groups:
    """Number the groups over each of the axes in `used`, from 1, in order of their first rank.

    Ranks number the mesh row-major, last axis fastest; within a group the axes count major first.
    """
    names = list(mesh)
    grid = np.arange(int(np.prod([mesh[n] for n in names], dtype=np.int64)), dtype=np.int64)
    shaped = grid.reshape([mesh[n] for n in names])
    first: dict[Axes, int] = {}
    members: dict[Axes, npt.NDArray[np.int64]] = {}
    number: dict[Axes, npt.NDArray[np.int64]] = {}
    start = 1
    for axes in used:
        rest = [i for i, n in enumerate(names) if n not in axes]
        rows = shaped.transpose([*rest, *(names.index(a) for a in axes)])
        rows = rows.reshape(-1, int(np.prod([mesh[a] for a in axes], dtype=np.int64)))
        first[axes], members[axes] = start, rows
        ids = np.empty(grid.size, dtype=np.int64)
        ids[rows.reshape(-1)] = np.repeat(np.arange(start, start + len(rows)), rows.shape[1])
        number[axes] = ids
        start += len(rows)
    return Groups(grid.size, first, members, number)
