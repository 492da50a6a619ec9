"""Latencies that users of a server see: times to first tokens and between tokens, over the
requests that were served."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from stagec.serving.served import ServedRequest
from stagec.serving.step_times import SECOND

#: Shares of the requests, in percent.
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class SecondsSpread:
    """Seconds of requests in ascending order; at least one."""

    values: Sequence[float]

    def percentile(self, percent: int) -> float:
        """The least value that this percentage of the requests does not exceed (nearest rank)."""
        return self.values[max(0, ceil(len(self.values) * percent / 100) - 1)]

    def as_json(self) -> dict[str, float]:
        """`mean`, `p50`, `p90` and `p99`."""
        mean = sum(self.values) / len(self.values)
        return {"mean": mean, **{f"p{n}": self.percentile(n) for n in PERCENTILES}}


def latencies(done: Sequence[ServedRequest], outside: float = 0.0) -> dict[str, SecondsSpread]:
    """The latencies by name: `ttft`, from arrival to the first token; `tpot`, the mean time between
    tokens of each request; `latency`, from arrival to the last token. Users see tokens the seconds
    `outside` later. Figures that no request has are left out, such as `tpot` where all requests
    have one token."""
    several = [j for j in done if j.request.output > 1]
    times = {
        "ttft": [(j.first - j.arrival) / SECOND + outside for j in done],
        "tpot": [(j.last - j.first) / SECOND / (j.request.output - 1) for j in several],
        "latency": [(j.last - j.arrival) / SECOND + outside for j in done],
    }
    return {n: SecondsSpread(sorted(values)) for n, values in times.items() if values}
