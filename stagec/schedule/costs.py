"""Exact costs of actions: integers and fractions of any unit of time."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from stagec.support.diagnostics import error

Time: TypeAlias = int | Fraction


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of one microbatch on the share of a rank in the model (1/p of it), in any unit.

    `backward` is the whole backward, of which `weight` is the gradient of the weights and the rest
    the gradient of the input. `overlapped` is a forward and a whole backward that run as one pair;
    None if overlap saves no time. Raises `DiagnosticError` for impossible times.
    """

    forward: Time = 1
    backward: Time = 2
    weight: Time = 1
    overlapped: Time | None = None

    def __post_init__(self) -> None:
        named = {"F": self.forward, "B": self.backward, "W": self.weight, "FB": self.overlapped}
        for name, time in named.items():
            if time is not None and time <= 0:
                raise error(f"the cost {name} is {time}", remedy="give a cost above 0")
        if self.weight >= self.backward:
            raise error(
                f"the weight gradient costs W = {self.weight}, no less than the whole backward, "
                f"B = {self.backward}",
                remedy=f"B includes W: give B={self.backward + self.weight} if B is the gradient of"
                " the input only",
            )

    @property
    def input_gradient(self) -> Time:
        """The part of backward for which the previous stage waits."""
        return self.backward - self.weight

    @property
    def pair(self) -> Time:
        """A forward and a whole backward as one overlapped step."""
        return self.forward + self.backward if self.overlapped is None else self.overlapped

    def scaled(self, share: Fraction) -> Costs:
        """The costs of a part of the work."""
        pair = None if self.overlapped is None else self.overlapped * share
        return Costs(self.forward * share, self.backward * share, self.weight * share, pair)


UNIT = Costs()
