"""Prompts that begin alike: blocks of tokens whose keys and values are kept for later requests.

A request names the blocks of its prompt by numbers, equal where the text up to there is equal
(`Request.prefix`, the `hash_ids` of Mooncake's traces). A block is referenced while a request uses
it; then it stays, and gives up its room when that is needed, the one longest unused first, as
vLLM's automatic prefix caching does (vllm/v1/core/kv_cache_manager.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from stagec.serving.tiers import CacheTiers


class PrefixCache:
    """The blocks that a replica of a server keeps, each of `pages` pages of its cache; those that
    give up their room go to the tiers `below`."""

    def __init__(self, pages: int, below: CacheTiers | None = None) -> None:
        self.pages, self.below = pages, below
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int], most: int) -> int:
        """How many of the first `most` blocks are there."""
        users = self._users
        for number, block in enumerate(blocks[:most]):
            if block not in users:
                return number
        return min(most, len(blocks))

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks no request uses: taking them takes free pages."""
        return sum(block in self._unused for block in blocks)

    def use(self, blocks: Sequence[int]) -> None:
        """A request uses these blocks, which are there."""
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)

    def add(self, block: int) -> bool:
        """Keep a block that a request has computed and uses; False if it is there already."""
        if block in self._users:
            return False
        self._users[block] = 1
        return True

    def leave(self, blocks: Sequence[int]) -> int:
        """A request uses these blocks no longer; how many of them nobody uses now. The last ones
        give up their room first."""
        idle = 0
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None
                idle += 1
        return idle

    def shrink(self, pages: int) -> None:
        """Give up unused blocks until they take at most so many pages."""
        while self.pages * len(self._unused) > pages:
            block, _ = self._unused.popitem(last=False)
            del self._users[block]
            if self.below is not None:
                self.below.store(block)

    def clear(self) -> None:
        """Lose all blocks, and those of tiers that do not outlive their replica."""
        if self.below is not None:
            self.below.fail()
        self._users.clear()
        self._unused.clear()
