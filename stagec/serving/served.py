"""The state of a request in a server, of the steps of a replica in flight, and its counters."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from stagec.serving.policy import LiveRequest
from stagec.serving.step_times import StepLine


@dataclass(slots=True, eq=False)
class ServedRequest(LiveRequest):
    """A request in a replica. While it decodes, `cached` and `generated` are those of its last
    change. `hit` counts tokens of the prompt that a prefix cache had. Times are in femtoseconds."""

    arrival: int = 0
    last: int = -1
    ends: int = -1  # the count of decode steps at which it ends, while it decodes
    hit: int = 0
    replica: int = -1
    swapped: bool = False
    ready: int = 0  # when its loads from tiers below the prefix cache end
    batch: int = 0  # the number of its batch, on pipeline stages
    shared: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class StepsUnderWay:
    """`count` steps in flight from `start` to `end`. Steps that only decode have their times by
    `line`, by `total`, the cached tokens at first, and `grows`, the tokens that each step adds;
    with chunks of prompts there is one step."""

    start: int
    end: int
    count: int
    total: int
    grows: int
    line: StepLine | None
    chunks: list[tuple[ServedRequest, int]]

    def done(self, now: int) -> int:
        """How many of the steps that only decode have ended before `now`."""
        return bisect_left(range(1, self.count + 1), now, key=self._end_of) if self.line else 0

    def cut(self, count: int) -> None:
        """End after fewer of the steps that only decode."""
        self.count, self.end = count, self._end_of(count)

    def _end_of(self, step: int) -> int:
        assert self.line is not None
        return self.start + self.line.times(self.total, self.grows, step)


@dataclass(slots=True)
class Tally:
    """The counters of a replica: steps; tokens `computed` in chunks and `decoded` one by one;
    tokens of prompts that a prefix cache had (`hits`), and those of them `loaded` from tiers below
    the device, by name of the tier; cached tokens `lost` to preemptions and failures, which are
    computed again; preempted and swapped requests; `adapters` loaded into slots."""

    steps: int = 0
    computed: int = 0
    decoded: int = 0
    hits: int = 0
    lost: int = 0
    preempted: int = 0
    swapped: int = 0
    adapters: int = 0
    loaded: Counter[str] = field(default_factory=Counter[str])
