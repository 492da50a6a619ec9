"""Who communicates with whom in a job, as arrays over all ranks: messages, and uses of groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagec.check.table import RankTable, lookup, positions
from stagec.program.nodes import Ints


@dataclass(frozen=True)
class PeerLinks:
    """An entry for each slot of each rank, in this order: the place of the rank, the slot, the
    place of the peer, and the slot that the peer has for the rank; -1 for a peer without a trace,
    and for one that has no messages with the rank. Entries of a place begin at `starts`."""

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
    """The ranks that issue collectives over each group, with the slots of the group on them: an
    entry for each, by ids of groups, then places of ranks."""

    number: Ints
    place: Ints
    slot: Ints

    @classmethod
    def of(cls, table: RankTable) -> GroupUses:
        """The uses of all ids of groups."""
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
        """The groups that are used, ascending."""
        return np.unique(self.number)
