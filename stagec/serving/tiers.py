"""Tiers below the prefix cache of a device: memory of the host, then a disk.

A block that gives up its room on the device goes to the first tier, one that a tier has no room
for to the next one; the one longest unused goes first. Writing takes no time: it goes the other way
of a link that loads use. A block that is loaded stays where it was. As in LMCache
(lmcache/v1/storage_backend), HiCache of SGLang with `write_back` (srt/mem_cache/hiradix_cache.py)
and the offloading connector of vLLM (distributed/kv_transfer/kv_connector/v1/offloading).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheTier:
    """A tier with room for so many `blocks`, each of which takes `load` femtoseconds to the device;
    `lasting`: it has them still after its replica has failed."""

    name: str
    blocks: int
    load: int
    lasting: bool = False
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def put(self, block: int) -> int | None:
        """Hold a block, as the last one used; the one that it takes the room of, if it does."""
        if not self.blocks:
            return block
        self.kept[block] = None
        self.kept.move_to_end(block)
        return self.kept.popitem(last=False)[0] if len(self.kept) > self.blocks else None


@dataclass(slots=True)
class CacheTiers:
    """The tiers of a replica, the fastest one first. With `blocking` a step waits for the loads of
    the requests that it begins; else a request waits for its own, and others go on."""

    tiers: Sequence[CacheTier]
    blocking: bool = False

    def store(self, block: int) -> None:
        """Take a block that gives up its room on the device."""
        pushed: int | None = block
        for tier in self.tiers:
            if pushed is not None:
                pushed = tier.put(pushed)

    def match(self, blocks: Sequence[int]) -> list[CacheTier]:
        """The tiers that have these blocks, up to the first one that none has."""
        tiers: list[CacheTier] = []
        for block in blocks:
            tier = next((t for t in self.tiers if block in t.kept), None)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def use(self, blocks: Sequence[int], tiers: Sequence[CacheTier]) -> int:
        """Load blocks from the tiers that have them; the time that it takes."""
        for block, tier in zip(blocks, tiers, strict=True):
            if block in tier.kept:  # unless it has just given way to one of the device
                tier.kept.move_to_end(block)
        return sum(tier.load for tier in tiers)

    def fail(self) -> None:
        """Lose what the process of a replica holds."""
        for tier in self.tiers:
            if not tier.lasting:
                tier.kept.clear()

    def clear(self) -> None:
        """Lose all blocks, which are of other weights."""
        for tier in self.tiers:
            tier.kept.clear()
