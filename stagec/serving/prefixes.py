"""The prefix cache of a replica: blocks of keys and values that later requests reuse, on the device
and in tiers below it, the memory of the host and a disk.

A request numbers the blocks of its prompt; two numbers are equal if the texts up to the end of the
block are equal (`Request.prefix`, the `hash_ids` of Mooncake's traces). A block that no request
uses stays cached until its room is needed; the least recently used one is evicted first, as in
vLLM's automatic prefix caching (vllm/v1/core/kv_cache_manager.py).

A block evicted from the device goes to the first tier, and the least recently used block of a full
tier to the next one. Writing takes no time, since it uses the other direction of the link than
loads. A block that is loaded also stays in its tier. LMCache (lmcache/v1/storage_backend), HiCache
of SGLang with `write_back` (srt/mem_cache/hiradix_cache.py) and the offloading connector of vLLM
(distributed/kv_transfer/kv_connector/v1/offloading) work in this way.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheTier:
    """A tier with room for `blocks` blocks, each of which takes `load` femtoseconds to load. A
    `lasting` tier survives a failure of its replica. `stored` has its blocks, the most recently
    used one last."""

    name: str
    blocks: int
    load: int
    lasting: bool = False
    stored: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def put(self, block: int) -> int | None:
        """Store a block as the most recently used one. Returns the block evicted for it, if any."""
        if not self.blocks:
            return block
        self.stored[block] = None
        self.stored.move_to_end(block)
        return self.stored.popitem(last=False)[0] if len(self.stored) > self.blocks else None


@dataclass(slots=True)
class CacheTiers:
    """The tiers of a replica, the fastest one first. With `blocking`, a step waits for the loads of
    the requests that it begins; without, only the request waits for its loads."""

    tiers: Sequence[CacheTier]
    blocking: bool = False

    def store(self, block: int) -> None:
        """Store a block that was evicted from the device."""
        pushed: int | None = block
        for tier in self.tiers:
            if pushed is not None:
                pushed = tier.put(pushed)

    def match(self, blocks: Sequence[int]) -> list[CacheTier]:
        """The tiers that have these blocks, up to the first block that no tier has."""
        tiers: list[CacheTier] = []
        for block in blocks:
            tier = next((t for t in self.tiers if block in t.stored), None)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def use(self, blocks: Sequence[int], tiers: Sequence[CacheTier]) -> int:
        """Load blocks from the tiers that have them. Returns the time, in femtoseconds."""
        for block, tier in zip(blocks, tiers, strict=True):
            if block in tier.stored:  # a block of the device may have evicted it just now
                tier.stored.move_to_end(block)
        return sum(tier.load for tier in tiers)

    def fail(self) -> None:
        """Lose the blocks of all tiers that do not survive a failure."""
        for tier in self.tiers:
            if not tier.lasting:
                tier.stored.clear()

    def clear(self) -> None:
        """Lose the blocks of all tiers, which other weights have computed."""
        for tier in self.tiers:
            tier.stored.clear()


class PrefixCache:
    """The blocks that a replica has cached, each of `pages` pages of its cache; evicted blocks go
    to the tiers `below`."""

    def __init__(self, pages: int, below: CacheTiers | None = None) -> None:
        self.pages, self.below = pages, below
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int], most: int) -> int:
        """The number of leading blocks that are cached, at most `most`."""
        users = self._users
        for number, block in enumerate(blocks[:most]):
            if block not in users:
                return number
        return min(most, len(blocks))

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks no request uses: their pages count as free until one does."""
        return sum(block in self._unused for block in blocks)

    @property
    def unused(self) -> int:
        """The pages of blocks that no request uses."""
        return self.pages * len(self._unused)

    def use(self, blocks: Sequence[int]) -> None:
        """Let a request use these blocks, which are cached."""
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)

    def add(self, block: int) -> bool:
        """Cache a block that a request has computed and uses; False if it is cached already."""
        if block in self._users:
            return False
        self._users[block] = 1
        return True

    def leave(self, blocks: Sequence[int]) -> int:
        """End the use of these blocks by a request. Returns how many of them no request uses now;
        of these, the last ones of the prompt are evicted first."""
        idle = 0
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None
                idle += 1
        return idle

    def shrink(self, pages: int) -> None:
        """Evict unused blocks until these have at most `pages` pages."""
        while self.pages * len(self._unused) > pages:
            block, _ = self._unused.popitem(last=False)
            del self._users[block]
            if self.below is not None:
                self.below.store(block)

    def clear(self) -> None:
        """Lose all blocks, and those of the tiers that do not survive a failure."""
        if self.below is not None:
            self.below.fail()
        self._users.clear()
        self._unused.clear()
