"""The members of communicator groups in three arrays, for hundreds of thousands of groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stagec.program.nodes import Ints


class GroupMembers(Mapping[int, tuple[int, ...]]):
    """The members of each group by its id, as in a groups file: the members of `ids[i]` are
    `ranks[starts[i]:starts[i + 1]]`."""

    def __init__(self, ids: Ints, sizes: Ints, ranks: Ints) -> None:
        self.ids, self.ranks = ids, ranks
        self.starts: Ints = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]
        self._made: dict[int, tuple[int, ...]] = {}

    @classmethod
    def of(cls, members: Mapping[int, tuple[int, ...]]) -> GroupMembers:
        """The members of a dictionary of groups."""
        every = [rank for ranks in members.values() for rank in ranks]
        sizes = [len(ranks) for ranks in members.values()]
        return cls(*(np.array(n, dtype=np.int64) for n in ([*members], sizes, every)))

    def with_group(self, number: int, ranks: Ints) -> GroupMembers:
        """A copy with one more group at the end."""
        sizes = np.append(self.sizes, len(ranks))
        return GroupMembers(np.append(self.ids, number), sizes, np.concatenate([self.ranks, ranks]))

    @property
    def sizes(self) -> Ints:
        """The number of members of each group."""
        return np.diff(self.starts)

    def places(self, numbers: Ints) -> Ints:
        """The index of each id, -1 for ids that do not exist."""
        if not len(self.ids):
            return np.full(len(numbers), -1)
        at = np.minimum(np.searchsorted(self._sorted, numbers), len(self.ids) - 1)
        return np.where(self._sorted[at] == numbers, self._order[at], -1)

    def __getitem__(self, number: int) -> tuple[int, ...]:
        if number not in self._made:
            place = int(self.places(np.array([number], dtype=np.int64))[0])
            if place < 0:
                raise KeyError(number)
            start, end = self.starts[place : place + 2].tolist()
            self._made[number] = tuple(self.ranks[start:end].tolist())
        return self._made[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __len__(self) -> int:
        return len(self.ids)
