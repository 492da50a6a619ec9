"""The times of the steps of a server, as linear functions of the cached tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Femtoseconds in a second. Times are integers in this unit, and so are the slopes of the time of a
#: step by the token, so that the sum over many steps at once equals that over single steps.
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
        """The time of a step, in femtoseconds."""
        return self.at + self.slope * (total - self.first)

    def times(self, total: int, grows: int, steps: int) -> int:
        """The time of `steps` steps, each with `grows` more tokens than the one before, in
        femtoseconds."""
        return steps * self.time(total) + self.slope * grows * (steps * (steps - 1) // 2)


class StepCosts(Protocol):
    """The times of steps, in femtoseconds, at least 1 each."""

    def decode(self, count: int, total: int) -> StepLine:
        """The times of steps in which `count` sequences decode; the line covers `total` tokens
        cached by all of them."""
        ...

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        """The time of a step with chunks of prompts, (new tokens, cached tokens) each, and `count`
        sequences that decode, with `total` tokens cached by all of them."""
        ...
