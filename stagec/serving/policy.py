"""Batching policies: which sequences add how many tokens in the next step.

A policy sees the sequences and the free blocks and returns a plan; `stagec.serving.engine` checks
the plan and carries it out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stagec.serving.requests import Request
from stagec.support.named import by_name, find


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
    """A request while it is served. A policy reads it, the engine writes it.

    `cached` tokens are in the cache, `generated` tokens were sampled. While the token sampled last
    is in flight (`pending`), there is nothing to add. `runs` says whether the request is admitted
    (None: it has not arrived, or it is done), `preempted` counts its preemptions, `first` is the
    time of its first token in nanoseconds.
    """

    request: Request
    number: int
    cached: int = 0
    generated: int = 0
    pending: bool = False
    runs: bool | None = None
    preempted: int = 0
    first: int | None = None

    @property
    def left(self) -> int:
        """The tokens that it can add now: those known but not cached yet; 1 in decode."""
        return 0 if self.pending else self.request.prompt + self.generated - self.cached


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
    """A batching policy. A subclass has a name and defines `plan`.

    A `steady` policy decides only by the order of sequences, `left`, limits and free blocks, and it
    does not admit a waiting sequence just because others decode and free blocks become fewer. A
    step in which sequences only decode is then repeated, without a call of `plan`, until one of
    them ends, a request arrives, or blocks run out.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    steady: ClassVar[bool] = False

    @abstractmethod
    def plan(self, state: ServerState) -> StepPlan:
        """The next step. An empty plan means to wait for the next arrival."""


class FirstComeFirstServed(BatchingPolicy):
    """Running sequences come first, each with all tokens that it can add within the budget; then
    requests are admitted while tokens, sequences and blocks last. If blocks run out, the sequence
    that came last is preempted, and no request is admitted.

    This is the policy of vLLM v1 (vllm/v1/core/sched/scheduler.py, `schedule`): decodes add one
    token each, and the rest of the budget goes to chunks of prompts.
    """

    name = "fcfs"
    summary = "first come first served, within a budget of tokens; prompts in chunks (vLLM v1)"
    steady = True

    def plan(self, state: ServerState) -> StepPlan:
        limits, free, budget = state.limits, state.free, state.limits.tokens
        running, work, preempted = (
            list(state.running),
            list[tuple[LiveRequest, int]](),
            list[LiveRequest](),
        )
        place = 0
        while place < len(running) and budget:
            live = running[place]
            tokens = min(live.left, budget)
            needed = state.needs(live, tokens) if tokens else 0
            while free is not None and needed > free and len(running) > place:
                last = running.pop()
                preempted.append(last)
                free += limits.blocks_for(last.cached)
            if place == len(running):
                break
            if tokens:
                work.append((live, tokens))
            budget -= tokens
            free = None if free is None else free - needed
            place += 1
        if preempted:
            return StepPlan(work, preempted)
        count = len(running)
        for live in state.waiting:
            tokens = min(live.left, budget)
            needed = state.needs(live, tokens)
            if not tokens or count == limits.sequences or (free is not None and needed > free):
                break
            work.append((live, tokens))
            budget -= tokens
            count += 1
            free = None if free is None else free - needed
        return StepPlan(work)


_BUILT_IN: tuple[BatchingPolicy, ...] = (FirstComeFirstServed(),)


def known_policies(extra: Iterable[BatchingPolicy] = ()) -> dict[str, BatchingPolicy]:
    """The built-in policies and further ones, by name. Raises `DiagnosticError` for a name used
    twice."""
    return by_name("batching policies", _BUILT_IN, extra)


def find_policy(name: str, extra: Iterable[BatchingPolicy] = ()) -> BatchingPolicy:
    """The policy with a name. Raises `DiagnosticError` with the nearest name if there is none."""
    return find("batching policy", name, known_policies(extra))


def policies_of(extras: Iterable[object]) -> list[BatchingPolicy]:
    """The batching policies among the objects of plug-ins."""
    return [extra for extra in extras if isinstance(extra, BatchingPolicy)]
