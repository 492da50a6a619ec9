"""Whether requests arrive faster than a server ends them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import sqrt

from stagec.serving.served import ServedRequest
from stagec.serving.step_times import SECOND

#: The least share of the arrivals by which the requests in the server have to grow, and the
#: standard deviations of a number of independent requests (Poisson) beyond which that is no chance.
_SHARE, _DEVIATIONS = 0.1, 4


def backlog_text(done: Sequence[ServedRequest], last: int) -> str:
    """A remark about a server in which requests pile up; empty without. Requests arrived until
    `last`, in femtoseconds. Those in the server at that time exceed those at half of it by a tenth
    of what arrived in between, and by more than chance explains."""
    arrivals, ends = sorted(j.arrival for j in done), sorted(j.last for j in done)
    half = last // 2
    at = [bisect_right(arrivals, now) - bisect_right(ends, now) for now in (half, last)]
    came, ended = (bisect_right(t, last) - bisect_right(t, half) for t in (arrivals, ends))
    more, chance = at[1] - at[0], _DEVIATIONS * sqrt(max(1, 2 * at[0]))
    if not more > max(_SHARE * came, chance):
        return ""
    seconds = (last - half) / SECOND
    return (
        f"requests pile up: {at[0]:,} are in the server after half of the arrivals and {at[1]:,} "
        f"at the last one, as {came / seconds:,.3g} arrive and {ended / seconds:,.3g} end per "
        "second, so times grow with --count; give a lower --rate, more --replicas, or more "
        "requests if the server is still filling up"
    )
