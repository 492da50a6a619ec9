"""Times of computations by a roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device for durations: peak FLOP/s and bytes/s."""

    flops: float
    bandwidth: float

    def seconds(self, flops: int, size: int) -> float:
        """Time of a computation that executes so many FLOPs and touches so many bytes."""
        return max(flops / self.flops, size / self.bandwidth)
