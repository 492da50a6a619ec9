"""Servers in a steady state, aggregated and disaggregated, from the seconds of their steps.

Each sequence that ends is followed by another one, and requests are evenly spaced, so none waits. A
sequence gets the first of its O tokens from the step that ends its prompt, and O - 1 from decode
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """The chunks of prompts in the steps of a group of ranks: each prompt takes `steps` steps with
    `size` tokens each, and `prompts` prompts are in a step. `share` is the share of steps with
    chunks; above 1, prompts arrive faster than steps can take them."""

    steps: int
    size: int
    prompts: int
    share: float

    @property
    def past(self) -> int:
        """The mean number of cached tokens of a prompt before one of its steps."""
        return self.size * (self.steps - 1) // 2

    @property
    def keeps_up(self) -> bool:
        """Whether steps can take prompts as fast as they arrive."""
        return self.share <= 1


def chunks(sequences: int, budget: int, prompt: int, output: int) -> PromptChunks | None:
    """The chunks of prompts in steps of at most `budget` tokens with `sequences` that decode; None
    if there is no room for any.

    In O - 1 steps each of the B sequences is replaced once, so B prompts of P tokens are computed,
    each in m = ceil(P / (T - B)) steps of T - B tokens. If a whole prompt is within the budget, a
    step has as many prompts as are needed to keep up, as far as there is room.
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


def among_groups(share: float, groups: int, every: float, one: float) -> tuple[float, float, float]:
    """Prompts of `groups` groups of ranks that wait for each other, each of which has prompts in
    this share s of its steps, independently. A step takes `every` seconds if all groups have some,
    `one` if a single one has, and the time between is linear in their number, which is binomial:

        any = 1 - (1 - s)^g,  seconds = one + (every - one) (g s / any - 1) / (g - 1)

    Returns the share of steps in which any group has prompts, the mean seconds of such a step, and
    those of a step in which a given group has some.
    """
    share = min(1.0, share)
    some = 1 - (1 - share) ** groups
    mean = one + (every - one) * (groups * share / some - 1) / (groups - 1)
    return some, mean, one + (every - one) * share


def decoding(sequences: int, budget: int, prompt: int, output: int) -> int:
    """The number of these sequences that decode at any time: the largest one for which prompts keep
    up, at least one; the others wait."""
    keeping = (
        n
        for n in range(sequences, 0, -1)
        if (work := chunks(n, budget, prompt, output)) is not None and work.keeps_up
    )
    return next(keeping, 1)


@dataclass(frozen=True, slots=True)
class MatchedPools:
    """Whole numbers of prefill and decode workers, and the requests per second that both
    sustain."""

    prefill: int
    decode: int
    requests: float

    def filled(self, ranks: int, prefill_ranks: int, decode_ranks: int) -> MatchedPools:
        """The pools with further workers on the remaining ranks: first for prefill, so that prompts
        wait less, then for decode."""
        left = ranks - self.prefill * prefill_ranks - self.decode * decode_ranks
        more, left = divmod(left, prefill_ranks)
        return MatchedPools(self.prefill + more, self.decode + left // decode_ranks, self.requests)


def matched(
    ranks: int, prefill_ranks: int, decode_ranks: int, prefill: float, decode: float
) -> MatchedPools | None:
    """The fewest workers of each kind with the highest throughput on at most `ranks` ranks; each
    completes `prefill` or `decode` requests per second. None if there is no room for one of each.

    x and y workers complete min(x p, y d) requests, on the ranks that the other kind leaves, so the
    optimum is next to the point where both are equal:

        x = N d / (r_d p + r_p d),  y = N p / (r_d p + r_p d)
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
    # the fewest of each with this throughput
    x, y = (max(1, ceil(best / each - 1e-9)) for each in (prefill, decode))
    return MatchedPools(x, y, min(best, x * prefill, y * decode))


def per_token(parts: Mapping[str, float], times: float) -> dict[str, float]:
    """The parts of the seconds of a step, each multiplied by `times`."""
    return {name: seconds * times for name, seconds in parts.items()}
