"""A server whose steps are recorded, of groups of ranks that step together."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from stagec.serving.adapters import AdapterSlots
from stagec.serving.pipelined import PipelinedReplica
from stagec.serving.planned import PlannedReplica
from stagec.serving.policy import FCFS, BatchingPolicy, ServerLimits
from stagec.serving.requests import Request, seconds_text
from stagec.serving.routing import ROUTERS
from stagec.serving.served import ServedRequest, StepsUnderWay
from stagec.serving.simulate import Simulation
from stagec.serving.step import Step, padded
from stagec.serving.step_times import StepLine
from stagec.support.diagnostics import error

#: The femtoseconds of a step, from the first stage to the last and on the slowest stage, each at
#: least 1.
StepTime = Callable[[Step], tuple[int, int]]


class _NoTime:
    """The costs of the steps of a group, which last as long as those of all groups together."""

    def decode(self, count: int, total: int) -> StepLine:
        return StepLine(0, 0, 0, total)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        return 0


_NO_TIME = _NoTime()


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A step: `groups` are those of the groups that have work, `step` is that of all of them
    (`padded`). It takes tokens that were sampled `after` steps before it: 1 for the step right
    before, 0 for no step. It ends at `end`, in femtoseconds."""

    step: Step
    groups: tuple[Step, ...]
    after: int
    end: int


class SteppedReplica(PipelinedReplica):
    """A replica of `groups` of ranks, whose steps, at most `most`, are recorded.

    Requests go to the groups round robin, in order of arrival. Each group has a queue, a cache and
    limits of its own; all groups step together, since they wait for each other.
    """

    def __init__(
        self, groups: Sequence[PipelinedReplica], time: StepTime, most: int, policy: str
    ) -> None:
        one = groups[0]
        super().__init__(0, one.limits, one.costs, pace=one.pace, stages=one.stages)
        self.groups, self.steps = groups, list[ServedStep]()
        self._step_time, self._most, self._policy = time, most, policy
        self._working: deque[Sequence[PipelinedReplica]] = deque()
        self.stop: Callable[[], None] = lambda: None  # called after the last step

    def check(self, left: int) -> None:
        """Raise `DiagnosticError` if so many requests are left, although more steps may follow."""
        if not left or len(self.steps) == self._most:
            return
        job = next(chain(*((*group.waiting, *group.live()) for group in self.groups)))
        raise error(
            f"the batching policy '{self._policy}' never serves request {job.number}, which waits "
            f"since {seconds_text(job.request.arrival)}: {left} are left, and the next step is "
            "empty",
            job.request.loc,
            remedy="let 'plan' choose at least one of those that wait",
        )

    def receive(self, job: ServedRequest) -> None:
        self.groups[(job.number - 1) % len(self.groups)].receive(job)

    def plan_batch(self, batch: int, now: int) -> StepsUnderWay | None:
        if len(self.steps) == self._most:
            return None
        lacks = not all(group.waiting for group in self.groups)
        for group in self.groups:
            group.lacks = lacks
        ways = [(group, group.plan_batch(batch, now)) for group in self.groups]
        working = [(group, way.chunks) for group, way in ways if way is not None]
        if not working:
            return None
        steps = tuple(group.composition(chunks) for group, chunks in working)
        step, waits = padded(steps), len(self._under)
        begin = max(way.end for _, way in ways if way is not None)  # after loads of adapters
        end = self._passes(begin, *self._step_time(step))
        way = StepsUnderWay(now, end, 1, 0, 0, None, [])
        after = waits + 1 if len(self.steps) > waits else 0
        self.steps.append(ServedStep(step, steps, after, end))
        self._under.append((batch, way))
        self._working.append([group for group, _ in working])
        return way

    def finish(self, now: int) -> tuple[list[ServedRequest], list[ServedRequest]]:
        if self.way is not None and not self.way.count:
            return super().finish(now)
        self._done, self.way = self._under.popleft()[0], None
        groups = self._working.popleft()
        if len(self.steps) == self._most and not self._under:
            self.stop()
        return [job for group in groups for job in group.finish(now)[0]], []


def stepped_server(
    requests: Sequence[Request],
    limits: ServerLimits,
    time: StepTime,
    most: int,
    *,
    policy: BatchingPolicy | None = None,
    stages: int = 1,
    groups: int = 1,
    slots: Callable[[], AdapterSlots | None] = lambda: None,
    **how: Any,
) -> tuple[SteppedReplica, Simulation]:
    """A server of `groups` groups of ranks with these limits each, and its simulation, which has
    not run. `policy` plans its steps (None: `stagec.serving.replica`), `slots` makes the slots for
    adapters of a group, and `how` are further arguments of `Replica`."""
    new = partial(PlannedReplica, policy) if policy is not None else PipelinedReplica
    about: dict[str, Any] = {"pace": _NO_TIME, "stages": stages, **how}
    each = [new(n, limits, _NO_TIME, adapters=slots(), **about) for n in range(groups)]
    replica = SteppedReplica(each, time, most, policy.name if policy is not None else FCFS)
    run = Simulation(requests, [replica], ROUTERS["round-robin"])
    replica.stop = run.stop
    return replica, run
