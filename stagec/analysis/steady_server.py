"""Servers in a steady state, aggregated and disaggregated, from the seconds of their steps.

Each sequence that ends is followed by another one, and requests come evenly spaced: nothing waits.
A sequence takes one token of its O from the step that ends its prompt, and O - 1 from steps that
decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """How the prompts of a group of ranks go through its steps: `steps` of a prompt with `size`
    tokens each, of so many `prompts` at a time. `share` is that of the steps that have some; above
    1, prompts come faster than steps take them."""

    steps: int
    size: int
    prompts: int
    share: float

    @property
    def past(self) -> int:
        """Tokens of a prompt that are cached before one of its steps, on average."""
        return self.size * (self.steps - 1) // 2

    @property
    def keeps_up(self) -> bool:
        """Whether steps take prompts as fast as they come."""
        return self.share <= 1


def chunks(sequences: int, budget: int, prompt: int, output: int) -> PromptChunks | None:
    """The chunks of prompts beside so many `sequences` that decode, in steps of at most `budget`
    tokens; None if these have no room for any.

    In O - 1 steps each of the B sequences is replaced once, so B prompts of P tokens are computed,
    each in m = ceil(P / (T - B)) steps of T - B tokens. Where a whole prompt is within the budget,
    as many are together as keep up, if there is room for so many.
    """
    room, turns = budget - sequences, output - 1
    if room < 1:
        return None
    steps = ceil(prompt / room)
    prompts = 1
    if steps == 1:
        prompts = min(max(1, ceil(sequences / turns)), room // prompt)
    share = sequences * steps / (prompts * turns)
    return PromptChunks(steps, ceil(prompt / steps), prompts, share)


def decoding(sequences: int, budget: int, prompt: int, output: int) -> int:
    """How many of these sequences of a server decode at any time: the most for which prompts keep
    up, at least one; the others wait."""
    keeping = (
        n
        for n in range(sequences, 0, -1)
        if (work := chunks(n, budget, prompt, output)) is not None and work.keeps_up
    )
    return next(keeping, 1)


@dataclass(frozen=True, slots=True)
class MatchedPools:
    """Whole workers that prefill and that decode, and the requests per second that both keep up
    with."""

    prefill: int
    decode: int
    requests: float

    def filled(self, ranks: int, prefill_ranks: int, decode_ranks: int) -> MatchedPools:
        """The same on all of the ranks, as far as workers fit: more that prefill, for which prompts
        wait less, then more that decode."""
        left = ranks - self.prefill * prefill_ranks - self.decode * decode_ranks
        more, left = divmod(left, prefill_ranks)
        return MatchedPools(self.prefill + more, self.decode + left // decode_ranks, self.requests)


def matched(
    ranks: int, prefill_ranks: int, decode_ranks: int, prefill: float, decode: float
) -> MatchedPools | None:
    """The workers of each kind on at most so many ranks that end most requests per second together,
    as few as do; a worker ends `prefill` or `decode` requests per second. None if there is no room
    for one of each.

    The requests of x and y workers are min(x p, y d), and each is at most what the other leaves, so
    the most is next to where both are equal: x = N d / (r_d p + r_p d), y = N p / (r_d p + r_p d).
    """
    if ranks < prefill_ranks + decode_ranks:
        return None
    scale = ranks / (decode_ranks * prefill + prefill_ranks * decode)
    pairs: list[tuple[int, int]] = []
    for more in (-1, 0, 1, 2):
        x = min(max(1, floor(scale * decode) + more), (ranks - decode_ranks) // prefill_ranks)
        y = min(max(1, floor(scale * prefill) + more), (ranks - prefill_ranks) // decode_ranks)
        pairs += (
            (x, (ranks - x * prefill_ranks) // decode_ranks),
            ((ranks - y * decode_ranks) // prefill_ranks, y),
        )
    best = max(min(x * prefill, y * decode) for x, y in pairs)
    # as few of each as end so many
    x, y = (max(1, ceil(best / each - 1e-9)) for each in (prefill, decode))
    return MatchedPools(x, y, min(best, x * prefill, y * decode))


def per_token(parts: Mapping[str, float], times: float) -> dict[str, float]:
    """Parts of the seconds of a step, each so many times."""
    return {name: seconds * times for name, seconds in parts.items()}
