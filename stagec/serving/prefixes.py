"""The prefix cache of a replica: blocks of keys and values that later requests reuse.

A request numbers the blocks of its prompt; two numbers are equal if the texts up to the end of the
block are equal (`Request.prefix`, the `hash_ids` of Mooncake's traces). A block that no request
uses stays cached until its room is needed; the least recently used one is evicted first, as in
vLLM's automatic prefix caching (vllm/v1/core/kv_cache_manager.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from stagec.serving.tiers import CacheTiers


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
