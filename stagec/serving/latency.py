"""Latencies that users of a server see: times to first tokens and between tokens, over the
requests that were served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stagec.serving.engine import Served
from stagec.serving.requests import SECOND

#: Shares of the requests, in percent.
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of requests in nanoseconds, sorted; at least one."""

    values: Sequence[Fraction]

    @property
    def mean(self) -> Fraction:
        """The mean, in nanoseconds."""
        return sum(self.values, Fraction(0)) / len(self.values)

    def percentile(self, percent: int) -> Fraction:
        """The least value that `percent` percent of the requests do not exceed (nearest rank)."""
        return self.values[max(0, -(-len(self.values) * percent // 100) - 1)]

    def as_json(self) -> dict[str, float]:
        """The `mean`, `p50`, `p90` and `p99` in seconds."""
        named = {f"p{n}": self.percentile(n) for n in PERCENTILES}
        return {name: float(v / SECOND) for name, v in {"mean": self.mean, **named}.items()}


def latencies(served: Sequence[Served]) -> dict[str, Latencies]:
    """The latencies by name: `ttft`, from arrival to the first token; `tpot`, the mean time between
    tokens of each request; `latency`, from arrival to the last token. Figures that no request has
    are left out, such as `tpot` where all requests have one token."""
    several = [s for s in served if s.request.output > 1]
    values_by_name = {
        "ttft": [Fraction(s.first - s.request.arrival) for s in served],
        "tpot": [Fraction(s.last - s.first, s.request.output - 1) for s in several],
        "latency": [Fraction(s.last - s.request.arrival) for s in served],
    }
    return {name: Latencies(sorted(values)) for name, values in values_by_name.items() if values}
