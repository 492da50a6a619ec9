"""Turns requests and a batching policy into the steps of a server.

The work is proportional to events (arrivals, prompts, ends), not to tokens: with a steady policy,
successive decode steps in which only contexts grow are one `Stretch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stagec.serving.policy import BatchingPolicy, LiveRequest, ServerLimits, ServerState, StepPlan
from stagec.serving.requests import Request, seconds_text
from stagec.serving.step import SequenceClass, Step, padded, step_of
from stagec.support.diagnostics import DiagnosticError, error

#: Nanoseconds of a step, at least 1: one number for all steps, or a function of the step.
Duration = int | Callable[[Step], int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps: the first is `step`, and in each later one every sequence has cached the
    tokens that it added in the one before.

    They run from `start` to `end`, in nanoseconds. The first one uses tokens that were sampled
    `after` steps before it: 1 for the step right before, 0 for no step. `groups` are the steps of
    the groups that have work; `step` is that of all of them (`padded`).
    """

    step: Step
    count: int
    start: int
    end: int
    after: int
    groups: tuple[Step, ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        """The steps one by one."""
        return map(self.step.later, range(self.count))


@dataclass(frozen=True, slots=True)
class Served:
    """A request that is done: the times of its first and its last token, in nanoseconds, and how
    often it was preempted."""

    request: Request
    number: int
    first: int
    last: int
    preempted: int


@dataclass(slots=True)
class _Flight:
    """A step in the pipeline: the requests that it samples a token for, and when these are
    ready."""

    number: int
    sampled: Sequence[LiveRequest]
    ready: int


@dataclass(slots=True)
class _Group:
    """The requests of a group of ranks, and the free blocks of its cache (None: unbounded)."""

    free: int | None
    running: list[LiveRequest] = field(default_factory=list[LiveRequest])
    waiting: deque[LiveRequest] = field(default_factory=deque[LiveRequest])

    def wait(self, live: LiveRequest, *, first: bool = False) -> None:
        """Put a request into the queue, at its end or as the `first`."""
        live.runs = False
        if first:
            self.waiting.appendleft(live)
        else:
            self.waiting.append(live)

    def give(self, blocks: int) -> None:
        """Take blocks from the free ones."""
        self.free = None if self.free is None else self.free - blocks


class Engine:
    """Serves requests step by step.

    Requests go to `groups` of ranks round robin, in order of arrival. Each group has `limits` of
    its own; all groups step together, since they wait for each other.

    `duration` is the time of a step. With `depth` pipeline stages, as many steps are in flight at
    once: a step begins every `duration`, and its tokens are ready `depth` durations later, as in
    vLLM, whose queue of batches has as many places as there are stages.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        policy: BatchingPolicy,
        limits: ServerLimits,
        duration: Duration,
        depth: int = 1,
        groups: int = 1,
    ) -> None:
        _check(requests, limits)
        self._policy, self._limits, self._duration, self._depth = policy, limits, duration, depth
        self._coming = deque(LiveRequest(r, i) for i, r in enumerate(requests, 1))
        self._groups = [_Group(limits.blocks) for _ in range(groups)]
        self._flights: deque[_Flight] = deque()
        self._now = self._steps = 0
        self._taken: int | None = None
        self.served: list[Served] = []

    @property
    def unserved(self) -> int:
        """The number of requests that are not done."""
        return len(self._coming) + sum(len(g.waiting) + len(g.running) for g in self._groups)

    def stretches(self, most: int) -> Iterator[Stretch]:
        """The steps until all requests are done, at most `most`. Raises `DiagnosticError` if the
        policy never serves a request, or returns an invalid plan."""
        while self._steps < most:
            while self._coming and self._coming[0].request.arrival <= self._now:
                live = self._coming.popleft()
                self._group_of(live).wait(live)
            plans = [(group, self._plan(group)) for group in self._groups]
            working = [(group, plan) for group, plan in plans if plan.work]
            if working:
                may_repeat = not any(plan.preempted for _, plan in plans)
                yield self._run(working, most if may_repeat else self._steps + 1)
            elif self._flights:
                self._land()
            elif self._coming:
                self._now = self._coming[0].request.arrival
            elif self.unserved:
                raise self._starved()
            else:
                return

    def _group_of(self, live: LiveRequest) -> _Group:
        return self._groups[(live.number - 1) % len(self._groups)]

    def _plan(self, group: _Group) -> StepPlan:
        """The plan of a group for the next step; preempted sequences return to the queue."""
        state = ServerState(group.running, group.waiting, self._limits, group.free)
        plan = self._policy.plan(state)
        _check_plan(self._policy, plan)
        for live in plan.preempted:
            if not live.runs or self._group_of(live) is not group:
                raise self._wrong(live, "gives up the cache of", "which does not run")
            group.running.remove(live)
            group.give(-self._limits.blocks_for(live.cached))
            live.cached, live.preempted = 0, live.preempted + 1
            group.wait(live, first=True)
        return plan

    def _run(self, plans: Sequence[tuple[_Group, StepPlan]], most: int) -> Stretch:
        """Run a step, repeated for as long as only contexts grow."""
        steps = tuple(self._take(group, plan) for group, plan in plans)
        step = padded(steps)
        start, after = self._now, self._steps - self._taken if self._taken is not None else 0
        repeats = (self._repeats(*each, s, most) for each, s in zip(plans, steps, strict=True))
        count = self._pass_time(step, min(repeats))
        sampled = [live for _, plan in plans for live, tokens in plan.work if tokens == live.left]
        for group, plan in plans:
            for live, tokens in plan.work:
                more = tokens + count - 1
                group.give(self._grown(live, more))
                live.cached += more
        for live in sampled:
            live.generated += count - 1
            live.pending = True
        self._steps += count
        ready = self._now + (self._depth - 1) * (self._now - start)
        self._flights.append(_Flight(self._steps - 1, sampled, ready))
        if len(self._flights) == self._depth:
            self._land()
        return Stretch(step, count, start, self._now, after, steps)

    def _pass_time(self, step: Step, count: int) -> int:
        """Advance the clock by `count` steps, or fewer if a request arrives first. Returns the
        number of steps."""
        arrival = self._coming[0].request.arrival if self._coming else None
        if isinstance(self._duration, int):
            if arrival is not None:
                count = min(count, -(-(arrival - self._now) // self._duration))
            self._now += count * self._duration
            return count
        for i in range(count):
            took = self._duration(step.later(i))
            if took < 1:
                raise error("a step takes no time", remedy="give it at least a nanosecond")
            self._now += took
            if arrival is not None and arrival <= self._now:
                return i + 1
        return count

    def _take(self, group: _Group, plan: StepPlan) -> Step:
        """Admit the waiting sequences of a plan. Returns the step. Raises `DiagnosticError` for an
        invalid plan."""
        tokens = needed = 0
        seen: set[LiveRequest] = set()
        for live, add in plan.work:
            if live in seen or live.runs is None or self._group_of(live) is not group:
                raise self._wrong(live, "asks for", "twice in a step, or before or after its time")
            if not 1 <= add <= live.left:
                raise self._wrong(live, f"adds {add} tokens to", f"which can add {live.left}")
            if not live.runs:
                group.waiting.remove(live)
                group.running.append(live)
                live.runs = True
            seen.add(live)
            tokens, needed = tokens + add, needed + self._grown(live, add)
        limits = self._limits
        over = (
            (tokens, limits.tokens, "tokens"),
            (len(group.running), limits.sequences, "sequences"),
            (needed, needed if group.free is None else group.free, "blocks of the cache"),
        )
        for used, bound, what in over:
            if used > bound:
                raise error(
                    f"the batching policy '{self._policy.name}' fills step {self._steps + 1} with "
                    f"{used:,} {what}, and there is room for {bound:,}",
                    remedy="let 'plan' keep to 'limits' and 'free' of its state",
                )
        return step_of(SequenceClass(n, live.cached, int(n == live.left)) for live, n in plan.work)

    def _repeats(self, group: _Group, plan: StepPlan, step: Step, most: int) -> int:
        """How often a group can run the step before a sequence ends or blocks run out."""
        decode = all(c.kind == "decode" for c in step.classes)
        if not (decode and self._policy.steady and self._depth == 1):
            return 1
        live = [each for each, _ in plan.work]
        if any(each.first is None for each in live):  # the last token of a prompt
            return 1
        longest = min(each.request.output - each.generated for each in live)
        longest = min(longest, most - self._steps)
        if group.free is None:
            return longest
        least = 1
        while least < longest:  # the largest count with enough blocks
            middle = (least + longest + 1) // 2
            fits = sum(self._grown(each, middle) for each in live) <= group.free
            least, longest = (middle, longest) if fits else (least, middle - 1)
        return least

    def _grown(self, live: LiveRequest, tokens: int) -> int:
        blocks = self._limits.blocks_for
        return blocks(live.cached + tokens) - blocks(live.cached)

    def _land(self) -> None:
        """Complete the oldest step in flight."""
        flight = self._flights.popleft()
        self._taken, self._now = flight.number, max(self._now, flight.ready)
        for live in flight.sampled:
            live.generated, live.pending = live.generated + 1, False
            live.first = flight.ready if live.first is None else live.first
            if live.generated == live.request.output:
                self._end(live, live.first, flight.ready)

    def _end(self, live: LiveRequest, first: int, last: int) -> None:
        group = self._group_of(live)
        (group.running if live.runs else group.waiting).remove(live)
        live.runs = None
        group.give(-self._limits.blocks_for(live.cached))
        self.served.append(Served(live.request, live.number, first, last, live.preempted))

    def _wrong(self, live: LiveRequest, does: str, why: str) -> DiagnosticError:
        return error(
            f"the batching policy '{self._policy.name}' {does} request {live.number}, {why}",
            live.request.loc,
            remedy="let 'plan' choose among 'running' and 'waiting' of its state, each once",
        )

    def _starved(self) -> DiagnosticError:
        live = next(live for g in self._groups for live in (*g.waiting, *g.running))
        return error(
            f"the batching policy '{self._policy.name}' never serves request {live.number}, which "
            f"waits since {seconds_text(live.request.arrival)}: {self.unserved} are left, and the "
            "next step is empty",
            live.request.loc,
            remedy="let 'plan' choose at least one of those that wait",
        )


def _check_plan(policy: BatchingPolicy, plan: object) -> None:
    if not isinstance(plan, StepPlan):
        raise error(
            f"the batching policy '{policy.name}' gives a {type(plan).__name__} as a step",
            remedy="return a stagec.api.StepPlan from 'plan'",
        )


def _check(requests: Sequence[Request], limits: ServerLimits) -> None:
    """Raise `DiagnosticError` for a request that never fits into the cache."""
    if limits.blocks is None:
        return
    for number, request in enumerate(requests, 1):
        # the last token is sampled, and not cached
        needed = limits.blocks_for(request.prompt + request.output - 1)
        if needed > limits.blocks:
            raise error(
                f"request {number} takes {needed:,} blocks of {limits.block} tokens at its end, "
                f"and the cache has {limits.blocks:,}",
                request.loc,
                remedy=f"give at least {needed:,} blocks, or leave the request out",
            )
