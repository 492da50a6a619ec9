"""A request while a server has it, the steps that hold it, and what a replica did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stagec.serving.requests import Request
from stagec.serving.step_times import StepLine


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A request while it is served: `generated` tokens are there, of which `cached` and those of
    the prompt are in a cache (`cached` counts both) when it does not decode. Times are in
    femtoseconds; `hit` are tokens of the prompt that a prefix cache had."""

    request: Request
    number: int
    arrival: int
    cached: int = 0
    generated: int = 0
    first: int = -1
    last: int = -1
    ends: int = -1  # the count of decode steps at which it ends, while it decodes
    stamp: int = 0  # of its last admission
    preempted: int = 0
    hit: int = 0
    replica: int = -1
    swapped: bool = False
    ready: int = 0  # when what it loads from a tier below the prefix cache is there
    batch: int = 0  # that has it, of those under way at a time
    shared: list[int] = field(default_factory=list[int])

    @property
    def left(self) -> int:
        """Tokens to compute before it decodes again; 1 where only the next token is missing."""
        return self.request.prompt + self.generated - self.cached


@dataclass(slots=True)
class StepsUnderWay:
    """Steps that are alike, from `start` on: `line` and `total` say how long each takes; chunks of
    prompts are of one step alone."""

    start: int
    end: int
    count: int
    total: int
    line: StepLine | None
    chunks: list[tuple[ServedRequest, int]]


@dataclass(slots=True)
class Tally:
    """What a replica did: steps, the time that they took, tokens `computed` in chunks, `decoded`
    one by one, those of prompts that a prefix cache had (`hits`), of which tiers below the device
    `loaded` some by their names, and cached ones that were `lost` to preemptions and failures,
    which are computed again. `adapters` were loaded into slots."""

    steps: int = 0
    busy: int = 0
    computed: int = 0
    decoded: int = 0
    hits: int = 0
    lost: int = 0
    preempted: int = 0
    swapped: int = 0
    adapters: int = 0
    loaded: Counter[str] = field(default_factory=Counter[str])
