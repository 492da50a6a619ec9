"""How long the steps of a server take: a line over the tokens that are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Units of time in a second: times are whole femtoseconds, so that slopes of a step's time a token
#: are whole numbers as well, and steps that are added up at once give what they give one by one.
SECOND = 10**15


@dataclass(frozen=True, slots=True)
class StepLine:
    """The time of a step in which `count` sequences decode, over the sum of their contexts:
    `at + slope * (total - first)`, for totals from `first` to `last`."""

    at: int
    slope: int
    first: int
    last: int

    def time(self, total: int) -> int:
        """Of a step, in femtoseconds."""
        return self.at + self.slope * (total - self.first)

    def times(self, total: int, grows: int, steps: int) -> int:
        """Of so many steps together, of which each has `grows` more tokens than the one before."""
        return steps * self.time(total) + self.slope * grows * (steps * (steps - 1) // 2)


class StepCosts(Protocol):
    """How long steps take, in femtoseconds, each at least one."""

    def decode(self, count: int, total: int) -> StepLine:
        """Of `count` sequences that decode, with `total` tokens cached together."""
        ...

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        """Of chunks of prompts, (new tokens, cached tokens) each, beside sequences that decode."""
        ...
