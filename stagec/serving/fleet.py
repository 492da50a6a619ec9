"""The replicas of a server over time: they start, take requests, drain, stop, fail and recover.

Autoscaling follows Kubernetes' horizontal pod autoscaler
(pkg/controller/podautoscaler/horizontal.go, metrics of the type AverageValue): after every `window`
the number of replicas wanted is the mean of a figure over the window, summed over all replicas, by
its `target` of one replica, rounded up. Further replicas start at once. Replicas stop only if fewer
were wanted throughout the last `delay` (the stabilization of scaling down).

Figures over time are in bins that become wider as time goes on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil

from stagec.serving.replica import Replica
from stagec.serving.served import ServedRequest

#: Relative slack of the number of replicas that are wanted, for loads that are floats.
_SLACK = 1e-9

#: The figures of `Fleet.series`: replicas that occupy ranks, replicas that take requests, and
#: requests that wait for such a replica.
FLEET_FIGURES = ("held", "up", "parked")


class ReplicaState(Enum):
    """The state of a replica. In all states but `OFF` it occupies its ranks."""

    OFF = "off"
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"  # it serves what it has, and takes no requests
    DOWN = "down"


#: The states of replicas in the order in which these are stopped.
_FIRST_TO_STOP = (ReplicaState.STARTING, ReplicaState.DOWN, ReplicaState.UP)

#: The figures of scaling rules, from `busy`, `running`, `waiting` and `pages` (means over time) and
#: the pages that a replica has.
SCALING_RULES: Mapping[str, Callable[[Sequence[float], int], float]] = {
    "requests": lambda figures, pages: figures[1] + figures[2],
    "queue": lambda figures, pages: figures[2],
    "busy": lambda figures, pages: figures[0],
    "cache": lambda figures, pages: figures[3] / pages,
}


@dataclass(frozen=True, slots=True)
class Autoscale:
    """From `least` to `most` replicas, by a rule of `SCALING_RULES` with the `target` of a replica.
    Times are in femtoseconds."""

    least: int
    most: int
    rule: str
    target: float
    window: int
    delay: int

    def wanted(self, load: float) -> int:
        """The number of replicas wanted for a load, the rule's figure summed over all replicas."""
        return min(self.most, max(self.least, ceil(load / self.target * (1 - _SLACK))))


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """How equal replicas start, scale and fail: `first` of them run at first (None: all), and one
    takes `start` to start. The time until a replica fails has the mean `mtbf` (0: it never fails),
    that until it takes requests again the mean `repair` (0: always `start`); both are drawn from
    exponential distributions with the `seed`, for each replica on its own. Times are in
    femtoseconds."""

    first: int | None = None
    start: int = 0
    autoscale: Autoscale | None = None
    mtbf: int = 0
    repair: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a replica, given by its number, at `at` femtoseconds. It is down for `seconds`
    (in femtoseconds as well; None: as its plan says). A drawn failure applies to this `life` of the
    replica only."""

    replica: int
    at: int
    seconds: int | None = None
    life: int | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A replica that takes requests from `at` femtoseconds on, unless its `life` has ended by
    then."""

    replica: int
    at: int
    life: int


@dataclass(slots=True)
class FleetTally:
    """The numbers of replicas that were started, were stopped, and failed."""

    started: int = 0
    stopped: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Member:
    replica: Replica
    state: ReplicaState
    source: random.Random
    life: int = 0  # how often it went down or off, or began to start


@dataclass
class Fleet:
    """The equal replicas of a server; `first` is the number of the first one among all replicas.
    `due` schedules later events."""

    replicas: Sequence[Replica]
    plan: FleetPlan
    first: int
    due: Callable[[Failure | Arrival], None]
    tally: FleetTally = field(default_factory=FleetTally)
    parked: list[ServedRequest] = field(default_factory=list[ServedRequest])
    series: TimeSeries = field(default_factory=lambda: TimeSeries(len(FLEET_FIGURES)))

    def __post_init__(self) -> None:
        plan = self.plan
        count = len(self.replicas) if plan.first is None else plan.first
        self._members = [
            _Member(
                replica,
                ReplicaState.UP if place < count else ReplicaState.OFF,
                random.Random(f"{plan.seed} {self.first + place}"),
            )
            for place, replica in enumerate(self.replicas)
        ]
        self._since = 0
        self._wanted: deque[tuple[int, int]] = deque([(0, count)])
        self._before = [0, 0, 0, 0, 0]
        self._open = True
        self._list()
        for member in self._members[:count]:
            self._fails_later(member, 0)

    def _list(self) -> None:
        """Update the replicas that take requests, and the number of those that occupy ranks."""
        states = [member.state for member in self._members]
        self.up = [m.replica for m in self._members if self._open and m.state is ReplicaState.UP]
        self.held = len(states) - states.count(ReplicaState.OFF)

    def note(self, now: int) -> None:
        """Add the time until now to the series."""
        if now > self._since:
            self.series.add(self._since, now, (self.held, len(self.up), len(self.parked)))
            self._since = now

    def _change(self, member: _Member, state: ReplicaState, now: int) -> None:
        self.note(now)
        member.state = state
        if state in (ReplicaState.OFF, ReplicaState.STARTING, ReplicaState.DOWN):
            member.life += 1
        if state is ReplicaState.OFF:
            self.tally.stopped += 1
            member.replica.forget()
        self._list()

    def close(self, now: int) -> None:
        """No replica takes requests until `open`, and those that are emptied stop: nothing is left
        of what they had."""
        self._set_open(now, value=False)
        for member in self._members:
            self.idle(member.replica, now)

    def open(self, now: int) -> None:
        """Replicas take requests again."""
        self._set_open(now, value=True)

    def _set_open(self, now: int, *, value: bool) -> None:
        self.note(now)
        self._open = value
        self._list()

    # -- requests without a replica ----------------------------------------------------------------

    def park(self, job: ServedRequest, now: int) -> None:
        """Let a request wait for a replica."""
        self.note(now)
        self.parked.append(job)

    def released(self, now: int) -> list[ServedRequest]:
        """The waiting requests, if there is a replica for them; they wait no longer."""
        return self.taken(now) if self.parked and self.up else []

    def taken(self, now: int) -> list[ServedRequest]:
        """The waiting requests, which wait no longer."""
        self.note(now)
        jobs, self.parked = self.parked, []
        return jobs

    # -- failures ----------------------------------------------------------------------------------

    def _fails_later(self, member: _Member, now: int) -> None:
        """Draw the time at which a replica that begins to run fails."""
        if self.plan.mtbf:
            at = now + _drawn(member.source, self.plan.mtbf)
            self.due(Failure(self.first + self._members.index(member), at, None, member.life))

    def fails(self, failure: Failure) -> bool:
        """Whether a failure meets a replica that runs."""
        member = self._members[failure.replica - self.first]
        runs = member.state in (ReplicaState.UP, ReplicaState.DRAINING)
        return runs and failure.life in (None, member.life)

    def fail(self, failure: Failure, now: int) -> None:
        """Let a replica fail; one that drains stops."""
        member = self._members[failure.replica - self.first]
        self.tally.failed += 1
        if member.state is ReplicaState.DRAINING:
            self._change(member, ReplicaState.OFF, now)
            return
        self._change(member, ReplicaState.DOWN, now)
        seconds, plan = failure.seconds, self.plan
        if seconds is None:
            seconds = _drawn(member.source, plan.repair) if plan.repair else plan.start
        self.due(Arrival(failure.replica, now + seconds, member.life))

    def arrive(self, arrival: Arrival, now: int) -> None:
        """Let a replica take requests, unless its life has ended."""
        member = self._members[arrival.replica - self.first]
        if member.life == arrival.life:
            self._change(member, ReplicaState.UP, now)
            self._fails_later(member, now)

    # -- scaling -----------------------------------------------------------------------------------

    def load(self, integrals: Sequence[int], now: int) -> float:
        """The figure of the scaling rule, as the mean since the last call. `integrals` are those
        over time of `busy`, `running`, `waiting` and `pages`, summed over all replicas."""
        auto = self.plan.autoscale
        assert auto is not None
        self.note(now)
        values = [*integrals, self.series.totals[2]]
        means = [(v - w) / auto.window for v, w in zip(values, self._before, strict=True)]
        self._before = values
        busy, running, waiting, pages, parked = means
        rule = SCALING_RULES[auto.rule]
        return rule((busy, running, waiting + parked, pages), self.replicas[0].room)

    def scale(self, load: float, now: int) -> list[Replica]:
        """Start and stop replicas. Returns those that drain from now on."""
        auto = self.plan.autoscale
        assert auto is not None
        wanted, recent = auto.wanted(load), self._wanted
        recent.append((now, wanted))
        while recent[0][0] < now - auto.delay:
            recent.popleft()
        active = [m for m in self._members if m.state in _FIRST_TO_STOP]
        if wanted > len(active):
            self._grow(wanted - len(active), now)
            return []
        return self._shrink(active, len(active) - max(n for _, n in recent), now)

    def _grow(self, count: int, now: int) -> None:
        """Add `count` replicas: draining ones take requests again first, then others start."""
        for state in (ReplicaState.DRAINING, ReplicaState.OFF):
            for member in [m for m in self._members if m.state is state][:count]:
                count -= 1
                if state is ReplicaState.DRAINING:
                    self._change(member, ReplicaState.UP, now)
                    continue
                self.tally.started += 1
                self._change(member, ReplicaState.STARTING, now)
                place = self.first + self._members.index(member)
                self.due(Arrival(place, now + self.plan.start, member.life))

    def _shrink(self, active: Sequence[_Member], count: int, now: int) -> list[Replica]:
        """Stop `count` replicas: those that do not run first, then those that come last."""
        order = [m for state in _FIRST_TO_STOP for m in reversed(active) if m.state is state]
        draining: list[Replica] = []
        for member in order[: max(0, count)]:
            runs = member.state is ReplicaState.UP
            self._change(member, ReplicaState.DRAINING if runs else ReplicaState.OFF, now)
            if runs:
                draining.append(member.replica)
        return draining

    def idle(self, replica: Replica, now: int) -> None:
        """Stop a replica without requests, if it drains."""
        for member in self._members:
            if member.replica is replica and member.state is ReplicaState.DRAINING:
                self._change(member, ReplicaState.OFF, now)


def _drawn(source: random.Random, mean: int) -> int:
    return max(1, round(source.expovariate(1.0) * mean))


#: The most bins of a series, and their first width in femtoseconds (a millisecond).
_BINS, _FIRST = 256, 10**12


class TimeSeries:
    """Integrals over time of several figures, in at most `_BINS` bins of one width. When time
    exceeds the last bin, pairs of bins are merged."""

    def __init__(self, figures: int) -> None:
        self.width = _FIRST
        self._bins = [[0] * _BINS for _ in range(figures)]

    def add(self, start: int, end: int, values: Sequence[int]) -> None:
        """The figures have these values from `start` to `end`, in femtoseconds."""
        while end > self.width * _BINS:
            self.width *= 2
            half = [0] * (_BINS // 2)
            self._bins = [[b[i] + b[i + 1] for i in range(0, _BINS, 2)] + half for b in self._bins]
        width = self.width
        first, last = start // width, (end - 1) // width
        for bins, value in zip(self._bins, values, strict=True):
            if not value:
                continue
            if first >= last:
                bins[first] += value * (end - start)
                continue
            bins[first] += value * ((first + 1) * width - start)
            for i in range(first + 1, last):
                bins[i] += value * width
            bins[last] += value * (end - last * width)

    @property
    def totals(self) -> list[int]:
        """The integral of each figure over all time."""
        return list(map(sum, self._bins))

    def widened(self, width: int) -> list[list[int]]:
        """The integrals in bins of this width, a multiple of its own."""
        step = width // self.width
        return [[sum(b[i : i + step]) for i in range(0, _BINS, step)] for b in self._bins]


def joined(series: Sequence[TimeSeries], end: int) -> tuple[int, list[list[float]]]:
    """The sum of several series: the width of bins in femtoseconds, and for each figure its mean in
    each bin up to `end`."""
    width = max(each.width for each in series)
    count = -(-end // width)
    widths = [width] * (count - 1) + [end - (count - 1) * width]
    bins = [each.widened(width) for each in series]
    return width, [
        [sum(values) / w for values, w in zip(zip(*rows, strict=True), widths, strict=False)]
        for rows in zip(*bins, strict=True)
    ]
