"""From requests and a policy to the steps of a server.

Work is in proportion to events (arrivals, prompts, ends), not to tokens: decode steps in which
nothing happens but that every context grows are one `Stretch`, if the policy is steady.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stagec.serving.policy import BatchingPolicy, LiveRequest, ServerLimits, ServerState, StepPlan
from stagec.serving.requests import Request, seconds_text
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.support.diagnostics import DiagnosticError, error

#: Nanoseconds that a step takes: 1 or more, of all steps or of each.
Duration = int | Callable[[Step], int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps one after the other: the first is `step`, and in each later one every sequence has as
    many more tokens cached as it added before.

    They run from `start` to `end`, in nanoseconds. The first of them uses tokens that the `after`
    last step before it sampled: 1 for the step right before, 0 for none.
    """

    step: Step
    count: int
    start: int
    end: int
    after: int

    @property
    def steps(self) -> Iterator[Step]:
        """Its steps."""
        return map(self.step.later, range(self.count))


@dataclass(frozen=True, slots=True)
class Served:
    """A request when it is done: when its first and its last token were there, in nanoseconds, and
    how often its cache was given up meanwhile."""

    request: Request
    number: int
    first: int
    last: int
    preempted: int


@dataclass(slots=True)
class _Flight:
    """A step whose tokens are on their way: who sampled one, and when they are there."""

    number: int
    sampled: Sequence[LiveRequest]
    ready: int


class Engine:
    """Serves requests step by step.

    `duration` says how long a step takes. With `depth` pipeline stages as many steps are under way
    at once: a step begins each `duration`, and its tokens are there `depth` of them later, as in
    vLLM, whose queue of batches has as many places as there are stages.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        policy: BatchingPolicy,
        limits: ServerLimits,
        duration: Duration,
        depth: int = 1,
    ) -> None:
        _check(requests, limits)
        self._policy, self._limits, self._duration, self._depth = policy, limits, duration, depth
        self._coming = deque(LiveRequest(r, i) for i, r in enumerate(requests, 1))
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self._flights: deque[_Flight] = deque()
        self._free, self._now, self._steps = limits.blocks, 0, 0
        self._taken: int | None = None
        self.served: list[Served] = []

    @property
    def unserved(self) -> int:
        """Requests that are not done."""
        return len(self._coming) + len(self._waiting) + len(self._running)

    def stretches(self, most: int) -> Iterator[Stretch]:
        """The steps until all requests are done, or so many of them. Raises `DiagnosticError` if
        the policy never serves a request, or asks for what cannot be."""
        while self._steps < most:
            while self._coming and self._coming[0].request.arrival <= self._now:
                self._wait(self._coming.popleft(), self._waiting.append)
            plan = self._policy.plan(
                ServerState(self._running, self._waiting, self._limits, self._free)
            )
            _sound(self._policy, plan)
            self._preempt(plan)
            if plan.work:
                yield self._run(plan, most)
            elif self._flights:
                self._land()
            elif self._coming:
                self._now = self._coming[0].request.arrival
            elif self.unserved:
                raise self._starved()
            else:
                return

    def _wait(self, live: LiveRequest, put: Callable[[LiveRequest], None]) -> None:
        live.runs = False
        put(live)

    def _preempt(self, plan: StepPlan) -> None:
        for live in plan.preempted:
            if not live.runs:
                raise self._wrong(live, "gives up the cache of", "which does not run")
            self._running.remove(live)
            self._give(-self._limits.blocks_for(live.cached))
            live.cached, live.preempted = 0, live.preempted + 1
            self._wait(live, self._waiting.appendleft)

    def _run(self, plan: StepPlan, most: int) -> Stretch:
        """Run a step as often as nothing happens in between."""
        step = self._take(plan)
        start, after = self._now, self._steps - self._taken if self._taken is not None else 0
        count = self._pass_time(step, self._repeats(plan, step, most))
        sampled = [live for live, tokens in plan.work if tokens == live.left]
        for live, tokens in plan.work:
            more = tokens + count - 1
            self._give(self._grown(live, more))
            live.cached += more
        for live in sampled:
            live.generated += count - 1
            live.pending = True
        self._steps += count
        ready = self._now + (self._depth - 1) * (self._now - start)
        self._flights.append(_Flight(self._steps - 1, sampled, ready))
        if len(self._flights) == self._depth:
            self._land()
        return Stretch(step, count, start, self._now, after)

    def _pass_time(self, step: Step, count: int) -> int:
        """Let the time of so many steps pass, but of none after the next arrival; how many."""
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

    def _take(self, plan: StepPlan) -> Step:
        """Let in what waits, and the classes of a step. Raises `DiagnosticError` for a plan that
        cannot be."""
        tokens = needed = 0
        seen: set[LiveRequest] = set()
        for live, add in plan.work:
            if live in seen or live.runs is None:
                raise self._wrong(live, "asks for", "twice in a step, or before or after its time")
            if not 1 <= add <= live.left:
                raise self._wrong(live, f"adds {add} tokens to", f"which can add {live.left}")
            if not live.runs:
                self._waiting.remove(live)
                self._running.append(live)
                live.runs = True
            seen.add(live)
            tokens, needed = tokens + add, needed + self._grown(live, add)
        limits = self._limits
        over = (
            (tokens, limits.tokens, "tokens"),
            (len(self._running), limits.sequences, "sequences"),
            (needed, needed if self._free is None else self._free, "blocks of the cache"),
        )
        for found, bound, what in over:
            if found > bound:
                raise error(
                    f"the batching policy '{self._policy.name}' fills step {self._steps + 1} with "
                    f"{found:,} {what}, and there is room for {bound:,}",
                    remedy="let 'plan' keep to 'limits' and 'free' of its state",
                )
        return step_of(SequenceClass(n, live.cached, int(n == live.left)) for live, n in plan.work)

    def _repeats(self, plan: StepPlan, step: Step, most: int) -> int:
        """How often the step can run before a sequence ends or blocks are needed."""
        decode = all(c.kind == "decode" for c in step.classes)
        if not (decode and self._policy.steady and self._depth == 1) or plan.preempted:
            return 1
        live = [each for each, _ in plan.work]
        longest = min(each.request.output - each.generated for each in live)
        longest = min(longest, most - self._steps)
        if self._free is None:
            return longest
        least = 1
        while least < longest:  # the largest count whose blocks are there
            middle = (least + longest + 1) // 2
            fits = sum(self._grown(each, middle) for each in live) <= self._free
            least, longest = (middle, longest) if fits else (least, middle - 1)
        return least

    def _grown(self, live: LiveRequest, tokens: int) -> int:
        blocks = self._limits.blocks_for
        return blocks(live.cached + tokens) - blocks(live.cached)

    def _give(self, blocks: int) -> None:
        self._free = None if self._free is None else self._free - blocks

    def _land(self) -> None:
        """The tokens of the oldest step under way are there."""
        flight = self._flights.popleft()
        self._taken, self._now = flight.number, max(self._now, flight.ready)
        for live in flight.sampled:
            live.generated, live.pending = live.generated + 1, False
            live.first = flight.ready if live.first is None else live.first
            if live.generated == live.request.output:
                self._end(live, live.first, flight.ready)

    def _end(self, live: LiveRequest, first: int, last: int) -> None:
        (self._running if live.runs else self._waiting).remove(live)
        live.runs = None
        self._give(-self._limits.blocks_for(live.cached))
        self.served.append(Served(live.request, live.number, first, last, live.preempted))

    def _wrong(self, live: LiveRequest, does: str, why: str) -> DiagnosticError:
        return error(
            f"the batching policy '{self._policy.name}' {does} request {live.number}, {why}",
            live.request.loc,
            remedy="let 'plan' choose among 'running' and 'waiting' of its state, each once",
        )

    def _starved(self) -> DiagnosticError:
        live = [*self._waiting, *self._running][0]
        return error(
            f"the batching policy '{self._policy.name}' never serves request {live.number}, which "
            f"waits since {seconds_text(live.request.arrival)}: {self.unserved} are left, and the "
            "next step is empty",
            live.request.loc,
            remedy="let 'plan' choose at least one of those that wait",
        )


def _sound(policy: BatchingPolicy, plan: object) -> None:
    if not isinstance(plan, StepPlan):
        raise error(
            f"the batching policy '{policy.name}' gives a {type(plan).__name__} as a step",
            remedy="return a stagec.api.StepPlan from 'plan'",
        )


def _check(requests: Sequence[Request], limits: ServerLimits) -> None:
    """Refuse requests that never fit."""
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
