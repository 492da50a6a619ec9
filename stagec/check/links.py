"""The communication of a job as arrays over all ranks: links between peers, and uses of groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagec.check.table import RankTable, lookup, positions
from stagec.program.nodes import Ints


@dataclass(frozen=True)
class PeerLinks:
    """An entry for each peer slot of each rank, ordered by rank and slot: the place of the rank
    (`here`), the slot, the place of the peer (`there`, -1 without a trace), and the slot that the
    peer has for the rank (`back`, -1 if it has no messages with it). The entries of a place begin
    at `starts[place]`."""

    here: Ints
    slot: Ints
    there: Ints
    back: Ints
    starts: Ints

    @classmethod
    def of(cls, table: RankTable) -> PeerLinks:
        """The links of all ranks."""
        values, starts = table.entries(lambda each: each.peers)
        here = np.repeat(np.arange(len(table)), np.diff(starts))
        slot = np.arange(len(values)) - starts[here]
        there = table.places(values)
        key = here * len(table) + there
        key[there < 0] = -1
        order = np.argsort(key, kind="stable")
        mirrored = there * len(table) + here
        mirrored[there < 0] = -2
        last = np.argsort(mirrored, kind="stable")
        back = np.full(len(values), -1)
        at = positions(key[order], mirrored[last])
        back[last] = lookup(slot[order], at)
        return cls(here, slot, there, back, starts)

    def backs(self, place: int) -> list[int]:
        """The slots that the peers of a rank have for it."""
        places: list[int] = self.back[self.starts[place] : self.starts[place + 1]].tolist()
        return places


@dataclass(frozen=True)
class GroupUses:
    """An entry for each group and each rank that issues collectives over it, ordered by group id
    and place: the id of the group, the place of the rank, and the slot of the group on that
    rank."""

    number: Ints
    place: Ints
    slot: Ints

    @classmethod
    def of(cls, table: RankTable) -> GroupUses:
        """The uses of all groups."""
        values, starts = table.entries(lambda each: each.groups)
        place = np.repeat(np.arange(len(table)), np.diff(starts))
        slot = np.arange(len(values)) - starts[place]
        order = np.argsort(values, kind="stable")
        number, place, slot = values[order], place[order], slot[order]
        kept = number >= 0
        kept[:-1] &= (number[1:] != number[:-1]) | (place[1:] != place[:-1])
        return cls(number[kept], place[kept], slot[kept])

    def of_group(self, number: int) -> slice:
        """The entries of one group."""
        left, right = (int(np.searchsorted(self.number, number, s)) for s in ("left", "right"))
        return slice(left, right)

    @cached_property
    def ids(self) -> Ints:
        """The ids of the groups that are used, ascending."""
        return np.unique(self.number)
