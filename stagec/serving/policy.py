"""Batching policies: which sequences add how many tokens in the next step.

A policy sees the sequences and the free blocks and returns a plan; `stagec.serving.planned` checks
the plan and carries it out. Without one a step has the sequences that `stagec.serving.replica`
chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stagec.serving.requests import Request
from stagec.support.named import by_name, find

#: The policy of `stagec.serving.replica`: first come first served, prompts in chunks (vLLM v1).
FCFS = "fcfs"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The capacity of a step and of the cache: the most new tokens of a step, the most sequences
    that run at once, and the blocks of the cache, of `block` tokens each (None: unbounded). Where
    several `groups` of ranks share a step, `chunk` is the most tokens of one of them, and so of one
    prompt. A sequence takes `fixed` blocks in addition to those of its tokens."""

    tokens: int
    sequences: int
    blocks: int | None = None
    block: int = 16
    chunk: int | None = None
    groups: int = 1
    fixed: int = 0

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks for the tokens of one sequence, and its fixed ones."""
        return -(-tokens // self.block) + (self.fixed if tokens else 0)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request while it is served. A policy reads it, the server writes it.

    `cached` tokens are in the cache or on their way there, `generated` tokens were sampled.
    `preempted` counts its preemptions, `first` is the time of its first token in femtoseconds, -1
    before.
    """

    request: Request
    number: int
    cached: int = 0
    generated: int = 0
    preempted: int = 0
    first: int = -1
    stamp: int = 0  # of its last admission

    @property
    def left(self) -> int:
        """The tokens that it can add now: those known but not cached yet; 1 in decode."""
        return self.request.prompt + self.generated - self.cached

    @property
    def pending(self) -> bool:
        """Whether the token sampled last is in flight, so that there is nothing to add."""
        return not self.left

    @property
    def runs(self) -> bool:
        """Whether it is admitted."""
        return self.stamp > 0


@dataclass(frozen=True, slots=True)
class ServerState:
    """The input of a policy: the running and the waiting sequences, each in order of arrival, the
    limits of a step, and the number of free blocks (None: unbounded)."""

    running: Sequence[LiveRequest]
    waiting: Iterable[LiveRequest]
    limits: ServerLimits
    free: int | None

    def needs(self, live: LiveRequest, tokens: int) -> int:
        """The number of further blocks for so many more tokens of a sequence."""
        return self.limits.blocks_for(live.cached + tokens) - self.limits.blocks_for(live.cached)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step: sequences and the tokens that each adds. Before that the `preempted` sequences
    lose their caches; they wait in front of all others and begin again."""

    work: Sequence[tuple[LiveRequest, int]]
    preempted: Sequence[LiveRequest] = ()


class BatchingPolicy(ABC):
    """A batching policy. A subclass has a name and defines `plan`."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def plan(self, state: ServerState) -> StepPlan:
        """The next step. An empty plan means to wait for the next arrival."""


def known_policies(extra: Iterable[BatchingPolicy] = ()) -> Mapping[str, BatchingPolicy | None]:
    """The policies by name; that of every replica, `FCFS`, has no object. Raises `DiagnosticError`
    for a name used twice."""
    return {FCFS: None, **by_name("batching policies", extra, taken=(FCFS,))}


def find_policy(name: str, extra: Iterable[BatchingPolicy] = ()) -> BatchingPolicy | None:
    """The policy with a name, None for `FCFS`. Raises `DiagnosticError` with the nearest name if
    there is none."""
    return find("batching policy", name, known_policies(extra))


def policies_of(extras: Iterable[object]) -> list[BatchingPolicy]:
    """The batching policies among the objects of plug-ins."""
    return [extra for extra in extras if isinstance(extra, BatchingPolicy)]
