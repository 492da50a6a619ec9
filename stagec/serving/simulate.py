"""A discrete event simulation of a server: arrivals, routing, steps of replicas, transfers of
caches between them, replicas that start, stop and fail.

Steps in which sequences only decode are one event until a sequence ends, pages run out or a request
arrives that can be admitted; the sum of their times is exactly that of single steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from stagec.serving.fleet import Arrival, Failure, Fleet, FleetPlan, TimeSeries, joined
from stagec.serving.replica import Replica
from stagec.serving.requests import Request, turns
from stagec.serving.rollouts import Rollouts
from stagec.serving.routing import Router
from stagec.serving.served import ServedRequest
from stagec.support.diagnostics import error

#: Femtoseconds of a nanosecond.
NANOSECOND = 10**6
#: The number of jobs that end between two calls of `progress`.
_OFTEN = 1000
#: The most failures that a request may meet while it runs.
_MOST_FAILURES = 1000
#: All replicas run all the time.
_ALL = FleetPlan()
#: The kinds of events, in the order of events at one time.
_RETURN, _FAIL, _SCALE, _UPDATED, _ARRIVE, _COME, _HANDED, _END, _FULL, _PLAN = range(10)

#: The figures of `Simulation.series`.
FIGURES = ("busy", "running", "waiting", "pages")


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The transfer of a request's caches from a replica, which had failed `stamp` times by then."""

    replica: Replica
    job: ServedRequest
    stamp: int


@dataclass
class Simulation:
    """A server of `replicas` that prefill and decode, or of `prefills` that only prefill and hand
    over to `replicas`. `kv_transfer(tokens)` is then the time for which the transfer of a prompt's
    caches occupies a link, and the part of it behind the last step of the prompt.

    Requests arrive at their times. With `concurrency` that many are in the server at any time: each
    that ends is followed by the next one a nanosecond later, so that steps which begin at its end
    are without it. The turns of a conversation follow each other (`Request.then`) and count as one
    request here; users see an answer `outside` after its last step, and pause from then on. Those
    of `rollouts` arrive in batches; no replica takes requests until the weights of the next batch
    have arrived. `plan` and `prefill_plan` say how replicas start, scale and fail; requests of a
    replica that fails are routed again, with their tokens but without their caches. Times are in
    femtoseconds.
    """

    requests: Sequence[Request]
    replicas: Sequence[Replica]
    route: Router
    prefills: Sequence[Replica] = ()
    kv_transfer: Callable[[int], tuple[int, int]] | None = None
    concurrency: int | None = None
    failures: Sequence[Failure] = ()
    plan: FleetPlan = _ALL
    prefill_plan: FleetPlan = _ALL
    outside: int = 0  # time of a request outside of its steps
    rollouts: Rollouts | None = None
    progress: Callable[[int, int], None] = lambda done, total: None
    done: list[ServedRequest] = field(default_factory=list[ServedRequest])
    end: int = 0
    area: int = 0  # the integral over time of the number of requests in the server

    def __post_init__(self) -> None:
        self._events: list[tuple[int, int, int, int, object]] = []
        self._number, self._numbers = count(), count(1)
        self._all = sum(1 for _ in turns(self.requests))
        self._coming = self._jobs()
        self._each = [*self.prefills, *self.replicas]
        self._series = {id(r): TimeSeries(len(FIGURES)) for r in self._each}
        self._since = {id(r): 0 for r in self._each}
        self._links = {id(r): 0 for r in self.prefills}
        self.prefill_fleet = Fleet(self.prefills, self.prefill_plan, 0, self._due)
        self.fleet = Fleet(self.replicas, self.plan, len(self.prefills), self._due)
        self._entry = self.prefill_fleet if self.prefills else self.fleet
        self._here = self._changed = 0

    def _jobs(self) -> Iterator[ServedRequest]:
        for request in self.requests:
            yield self._job(request, request.arrival * NANOSECOND)

    def _job(self, request: Request, at: int) -> ServedRequest:
        return ServedRequest(request, next(self._numbers), arrival=at)

    def run(self) -> None:
        """Serve all requests, or all batches of rollouts."""
        for failure in self.failures:
            self._due(failure)
        for fleet in (self.prefill_fleet, self.fleet):
            self._scale_later(fleet, 0)
        rollouts = self.rollouts
        if rollouts is not None:
            self._begin_batch(0, rollouts)
        for _ in range(0 if rollouts is not None else self.concurrency or 1):
            self._next(0)
        events = self._events
        handlers = {
            _RETURN: self._return,
            _FAIL: self._fail,
            _SCALE: self._scale,
            _UPDATED: self._updated,
            _ARRIVE: self._arrive,
            _COME: self._come,
            _HANDED: self._handed,
            _END: self._finish,
            _FULL: self._full,
            _PLAN: self._plan,
        }
        while events and (len(self.done) < self._all if rollouts is None else not rollouts.over):
            now, kind, _, version, what = heappop(events)
            if isinstance(what, Replica) and kind >= _END and what.version != version:
                continue
            self.end = now if kind not in (_FAIL, _SCALE) else self.end
            handlers[kind](now, what)
        for replica in self._each:
            self._watch(replica, self.end)
        for fleet in (self.prefill_fleet, self.fleet):
            fleet.note(self.end)

    def stop(self) -> None:
        """End after the event that is handled."""
        self._all = 0

    def means(self, replicas: Sequence[Replica]) -> list[float]:
        """The means over time of `FIGURES`, summed over replicas."""
        totals = [self._series[id(r)].totals for r in replicas]
        return [sum(each) / max(1, self.end) for each in zip(*totals, strict=True)]

    def over_time(self, replicas: Sequence[Replica]) -> tuple[int, list[list[float]]]:
        """The width of bins in femtoseconds, and the mean of each of `FIGURES`, then of each of
        `FLEET_FIGURES`, in each bin."""
        end = max(1, self.end)
        width, rows = joined([self._series[id(r)] for r in replicas], end)
        return width, [*rows, *joined([self.fleet_of(replicas).series], end)[1]]

    def fleet_of(self, replicas: Sequence[Replica]) -> Fleet:
        """The fleet of these replicas, which are all of one kind."""
        return self._fleet_of(replicas[0].prefills)

    def kept_tokens(self) -> int:
        """The generated tokens of requests that are not done."""
        return sum(replica.kept_tokens(self.end) for replica in self._each)

    # -- events ------------------------------------------------------------------------------------

    def _push(self, at: int, kind: int, what: object) -> None:
        version = what.version if isinstance(what, Replica) else 0
        heappush(self._events, (at, kind, next(self._number), version, what))

    def _next(self, now: int) -> None:
        """Schedule the arrival of the next request of the list."""
        job = next(self._coming, None)
        if job is not None:
            if self.concurrency is not None or self.rollouts is not None:
                job.arrival = now
            self._push(job.arrival, _ARRIVE, job)

    def _arrive(self, now: int, what: object) -> None:
        if self.concurrency is None and self.rollouts is None:
            self._next(now)
        self._come(now, what)

    def _come(self, now: int, what: object) -> None:
        assert isinstance(what, ServedRequest)
        self._count(now, 1)
        self._send(what, self._entry, now)

    def _send(self, job: ServedRequest, fleet: Fleet, now: int) -> None:
        """Route a job to a replica, or let it wait until there is one."""
        if not fleet.up:
            fleet.park(job, now)
            return
        replica = self.route(job, fleet.up)
        self._watch(replica, now)
        replica.receive(job)
        if replica.way is None:
            self._wake(replica, now)
        elif replica.looks(now):
            replica.version += 1
            self._push(replica.way.end, _END, replica)

    def _wake(self, replica: Replica, now: int) -> None:
        """Let an idle replica plan at `now`, after all other events of that time."""
        replica.version += 1
        self._push(now, _PLAN, replica)

    def _plan(self, now: int, what: object) -> None:
        assert isinstance(what, Replica)
        self._watch(what, now)
        way = what.plan(now)
        if way is not None:
            what.version += 1
            self._push(way.end, _END, what)
        elif what.wakes is not None:
            self._wake(what, what.wakes)
        elif not what.load:
            self._fleet_of(what.prefills).idle(what, now)

    def _finish(self, now: int, what: object) -> None:
        assert isinstance(what, Replica)
        self._watch(what, now)
        ended, prompts = what.finish(now)
        for job in ended:
            self.done.append(job)
            self._count(now, -1)
            then = None
            if job.request.then is not None:
                gap, request = job.request.then
                at = now + self.outside + gap * NANOSECOND
                then = self._job(request, at)
                self._push(at, _COME, then)
            elif self.concurrency is not None:
                self._next(now + NANOSECOND)
            if self.rollouts is not None:
                self.rollouts.ended(job, then)
        if ended and len(self.done) // _OFTEN != (len(self.done) - len(ended)) // _OFTEN:
            self.progress(len(self.done), self._all)
        if what.prefills:
            for job in prompts:
                if job.last < 0:
                    self._hand_over(what, job, now)
        self._wake(what, now)
        if self.rollouts is not None and self.rollouts.full:
            self._push(now, _FULL, None)

    def _hand_over(self, replica: Replica, job: ServedRequest, now: int) -> None:
        """Transfer the caches of a prompt to where it is decoded, one prompt after the other."""
        busy, rest = self.kv_transfer(job.cached) if self.kv_transfer is not None else (0, 0)
        link = max(self._links[id(replica)] + busy, now + rest)
        self._links[id(replica)] = link
        self._push(link, _HANDED, _Transfer(replica, job, replica.stamp))

    def _handed(self, now: int, what: object) -> None:
        assert isinstance(what, _Transfer)
        replica, job = what.replica, what.job
        if replica.stamp != what.stamp:  # it failed in the meantime
            return
        self._watch(replica, now)
        replica.release(job)
        if job.first < 0:
            job.first = now
        if replica.way is None:
            self._wake(replica, now)
        self._send(job, self.fleet, now)

    # -- batches of rollouts -----------------------------------------------------------------------

    def _begin_batch(self, now: int, rollouts: Rollouts) -> None:
        for _ in range(rollouts.begin(now, *self._integrals(now))):
            self._next(now)
        if rollouts.full:  # more of the batch before were done at once
            self._push(now, _FULL, None)

    def _full(self, now: int, what: object) -> None:
        """Enough requests of a batch are done. Before new weights nothing runs, and what has been
        cached is lost."""
        rollouts = self.rollouts
        if rollouts is None or not (rollouts.begun and rollouts.full):
            return
        rollouts.close(now, *self._integrals(now))
        at, version = rollouts.following(now)
        if rollouts.over:
            return
        if version == rollouts.version:
            self._begin_batch(now, rollouts)
            return
        for job in [job for replica in self._each for job in self._interrupt(replica, now)]:
            rollouts.mark(job)
            self._entry.park(job, now)
        for replica in self._each:
            if replica.tiers is not None:
                replica.tiers.clear()
        for fleet in (self.prefill_fleet, self.fleet):
            fleet.close(now)
        if self.prefills:
            for job in self.fleet.taken(now):  # whose caches no replica has taken
                self._each[job.replica].tally.lost += job.cached
                job.cached = 0
                rollouts.mark(job)
                self._entry.park(job, now)
        self._push(at, _UPDATED, version)

    def _updated(self, now: int, what: object) -> None:
        """New weights are there."""
        assert self.rollouts is not None
        assert isinstance(what, int)
        self.rollouts.version = what
        for fleet in (self.prefill_fleet, self.fleet):
            fleet.open(now)
            self._release(fleet, now)
        self._begin_batch(now, self.rollouts)

    def _integrals(self, now: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Integrals until now of replicas with steps, and of those with ranks, of each pool."""
        for replica in self._each:
            self._watch(replica, now)
        pools = [fleet for fleet in (self.prefill_fleet, self.fleet) if fleet.replicas]
        for fleet in pools:
            fleet.note(now)
        busy = (sum(self._series[id(r)].totals[0] for r in f.replicas) for f in pools)
        return tuple(busy), tuple(fleet.series.totals[0] for fleet in pools)

    # -- failures and scaling ----------------------------------------------------------------------

    def _fleet_of(self, prefills: bool) -> Fleet:
        return self.prefill_fleet if prefills else self.fleet

    def _due(self, what: Failure | Arrival) -> None:
        self._push(what.at, _FAIL if isinstance(what, Failure) else _RETURN, what)

    def _fail(self, now: int, what: object) -> None:
        assert isinstance(what, Failure)
        replica = self._each[what.replica]
        self._watch(replica, now)
        fleet = self._fleet_of(replica.prefills)
        if not fleet.fails(what):
            return
        jobs = self._interrupt(replica, now)
        fleet.fail(what, now)
        for job in jobs:  # with two pods, prompts are computed again in the pod of prefill
            if job.preempted > _MOST_FAILURES:
                raise error(
                    f"a request lost its caches {_MOST_FAILURES:,} times: replicas fail before "
                    "they compute its prompt",
                    remedy="give a longer --mtbf",
                )
            self._send(job, self._entry, now)

    def _interrupt(self, replica: Replica, now: int) -> list[ServedRequest]:
        """Nothing is under way at a replica, and its caches are lost; the jobs that it had."""
        replica.version += 1
        replica.stamp += 1
        return replica.fail(now)

    def _return(self, now: int, what: object) -> None:
        assert isinstance(what, Arrival)
        replica = self._each[what.replica]
        self._watch(replica, now)
        self._fleet_of(replica.prefills).arrive(what, now)
        if self._events and self._events[0][:2] == (now, _RETURN):
            return  # requests that wait are shared by all that return at this time
        for fleet in (self.prefill_fleet, self.fleet):
            self._release(fleet, now)

    def _release(self, fleet: Fleet, now: int) -> None:
        for job in fleet.released(now):
            self._send(job, fleet, now)

    def _scale_later(self, fleet: Fleet, now: int) -> None:
        if fleet.plan.autoscale is not None:
            self._push(now + fleet.plan.autoscale.window, _SCALE, fleet)

    def _scale(self, now: int, what: object) -> None:
        """Start and stop replicas by their load since the last time."""
        assert isinstance(what, Fleet)
        for replica in what.replicas:
            self._watch(replica, now)
        totals = [self._series[id(r)].totals for r in what.replicas]
        for replica in what.scale(what.load([*map(sum, zip(*totals, strict=True))], now), now):
            if not replica.load:
                what.idle(replica, now)
        self._release(what, now)
        self._scale_later(what, now)

    # -- counters ----------------------------------------------------------------------------------

    def _watch(self, replica: Replica, now: int) -> None:
        """Add the figures of a replica until now to its series."""
        since = self._since[id(replica)]
        if now > since:
            values = replica.way is not None, replica.running, len(replica.waiting), replica.used
            self._series[id(replica)].add(since, now, values)
            self._since[id(replica)] = now

    def _count(self, now: int, more: int) -> None:
        self.area += self._here * (now - self._changed)
        self._here, self._changed = self._here + more, now
