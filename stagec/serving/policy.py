"""Batching policies: which sequences add how many tokens in the next step.

A policy sees the sequences and what is free, and says what to do; the engine (`stagec.serving.
engine`) checks what it says and keeps the books.
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
    """What a step, and the cache, can hold: new tokens of a step, sequences that run at once, and
    blocks of the cache of `block` tokens each (None: as many as are needed). Where several `groups`
    of ranks share a step, `chunk` are the tokens of one of them: the most of one prompt. A sequence
    takes `fixed` blocks beside those of its tokens."""

    tokens: int
    sequences: int
    blocks: int | None = None
    block: int = 16
    chunk: int | None = None
    groups: int = 1
    fixed: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-tokens // self.block) + (self.fixed if tokens else 0)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request while it is served. A policy reads it, the engine writes it.

    `cached` tokens are in the cache, `generated` ones were sampled. While the token that it
    sampled last is on its way (`pending`), there is nothing to add. `runs` says whether it was let
    in, `preempted` counts how often its cache was given up, `first` is when its first token was
    there.
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
        """Tokens that it can add now: those known and not cached yet; 1 in decode."""
        return 0 if self.pending else self.request.prompt + self.generated - self.cached


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a policy decides by: the sequences that run and those that wait, each in the order in
    which they came, what a step can hold, and the free blocks (None: no bound)."""

    running: Sequence[LiveRequest]
    waiting: Iterable[LiveRequest]
    limits: ServerLimits
    free: int | None

    def needs(self, live: LiveRequest, tokens: int) -> int:
        """The blocks that so many more tokens of a sequence take beside those it has."""
        return self.limits.blocks_for(live.cached + tokens) - self.limits.blocks_for(live.cached)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step: sequences and the tokens that each adds, and before that, sequences whose
    cache is given up: they wait, in front of all others, and begin again."""

    work: Sequence[tuple[LiveRequest, int]]
    preempted: Sequence[LiveRequest] = ()


class BatchingPolicy(ABC):
    """A batching policy. A subclass names itself and gives `plan`.

    A policy that is `steady` decides by the order of sequences, by `left`, by limits and free
    blocks only, and lets a sequence that waits go on waiting while others decode and blocks become
    fewer: a step in which sequences only decode is then repeated, without asking again, until one
    of them ends, a request arrives, or blocks run out.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    steady: ClassVar[bool] = False

    @abstractmethod
    def plan(self, state: ServerState) -> StepPlan:
        """The next step. An empty one means to wait for the next arrival."""


class FirstComeFirstServed(BatchingPolicy):
    """Sequences that run come first, each with all that it can add as far as the budget goes; then
    requests are let in while tokens, sequences and blocks last. If blocks run out, the sequence
    that came last gives up its cache, and nothing is let in.

    vLLM v1 does so (vllm/v1/core/sched/scheduler.py, `schedule`): decodes add one token each, the
    rest of the budget goes to chunks of prompts.
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
    """The built-in policies and others. Raises `DiagnosticError` for a name used twice."""
    return by_name("batching policies", _BUILT_IN, extra)


def find_policy(name: str, extra: Iterable[BatchingPolicy] = ()) -> BatchingPolicy:
    """The policy of a name. Raises `DiagnosticError` with the nearest name if there is none."""
    return find("batching policy", name, known_policies(extra))


def policies_of(extras: Iterable[object]) -> list[BatchingPolicy]:
    """The policies among what plug-ins brought."""
    return [extra for extra in extras if isinstance(extra, BatchingPolicy)]
