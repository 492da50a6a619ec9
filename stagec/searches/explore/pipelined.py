"""A lower bound of the time of a pipeline by its actions, one after the other on each rank.

The time of a chunk for a microbatch comes from a probe of one stage. Of the waits at its ends only
those count that no other action can fill:

    rank 0   F0 F1    B0 F2 B1 ..        an action starts when the one before it is done, its
    rank 1      F0 B0 F1 B1 ..           streams are free, and its input has arrived
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from stagec.schedule.action import round_robin
from stagec.schedule.registry import SCHEDULES
from stagec.searches.explore.layout import Layers
from stagec.sharding.stages import evenly
from stagec.support.diagnostics import DiagnosticError

#: The most actions of a pipeline; for more there is no bound.
_MOST_ACTIONS = 200_000


class Pair(NamedTuple):
    """Seconds of a forward and of a backward action."""

    forward: float = 0.0
    backward: float = 0.0


NONE = Pair()


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of the forward or the backward of a chunk, from its first computation to its last
    one: `layer` for each layer, less `border`, which follows the last computation. `first` and
    `last` are the seconds of the first and the last stage in addition to repeated layers."""

    layer: float
    border: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """Seconds of the actions of a pipeline: of forward and of backward, None if not known.

    `gaps[a][b]` is the wait between the last computation of an action of phase a and the first one
    of the next, of phase b; `inner` is that between actions that end and begin with repeated
    layers, where the next one also communicates before its first computation. `tail` is the time of
    a layer after the last backward.
    """

    phases: tuple[PhaseTimes | None, PhaseTimes | None]
    gaps: tuple[Pair, Pair] = (NONE, NONE)
    inner: tuple[Pair, Pair] = (NONE, NONE)
    tail: float = 0.0

    def exchanging(self, other: ActionTimes | None, tail: float) -> ActionTimes:
        """These times with the communication of data-parallel ranks, from the probe `other`; the
        times outside of the repeated layers stay."""
        if other is None:
            return replace(self, tail=tail)
        (one, two), (first, second) = self.phases, other.phases
        phases = _exchanging(one, first), _exchanging(two, second)
        return ActionTimes(phases, other.gaps, other.inner, tail)


def _exchanging(mine: PhaseTimes | None, other: PhaseTimes | None) -> PhaseTimes | None:
    if mine is None or other is None:
        return mine
    return replace(mine, layer=other.layer, border=other.border)


class _Action(NamedTuple):
    """An action: 0 for forward, 1 for backward; its rank, the kind of the action before it on the
    rank (2: there is none; 3 or 4: one of kind 0 or 1 that ends outside of the repeated layers),
    its stage, and the number of the action whose result it takes, or -1."""

    kind: int
    rank: int
    before: int
    part: int
    source: int


class PipelineBound(NamedTuple):
    """The shape of a pipeline: its schedule, stages, microbatches and chunks of a rank (0: the
    schedule's own number), and the layers of each stage, if they are given."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    cut: tuple[int, ...] = ()


def pipelined(
    layers: Layers, shape: PipelineBound, times: ActionTimes, ready: Pair = NONE, again: float = 0.0
) -> float:
    """A lower bound of the seconds of a step. `ready` is the time from the last computation of an
    action to the arrival of its result, `again` the time that a backward may recompute before its
    input has arrived.

    Returns 0 where there is no bound: for actions without a plain order, and for models with mixed
    layers.
    """
    actions = _actions(*shape[:4])
    forward, backward = times.phases
    if not actions or forward is None or backward is None or layers.mixed:
        return 0.0
    depth = 1 + max(a.part for a in actions)
    try:
        given = shape.cut or evenly(layers.total, depth)
    except DiagnosticError:
        return 0.0
    parts = layers.of_parts(given)
    whole = given[0] >= layers.before, given[-1] >= layers.after
    takes = [_takes(phase, parts, whole) for phase in (forward, backward)]
    ends = _ends(actions, takes, times, Pair(ready[0], ready[1] - again), shape.stages)
    own = [sum(parts[rank :: shape.stages]) for rank in range(shape.stages)]
    return max(end + count * times.tail for end, count in zip(ends, own, strict=True))


def _takes(phase: PhaseTimes, parts: Sequence[int], whole: tuple[bool, bool]) -> list[float]:
    """Seconds of an action of each stage. `whole` says whether the first and the last stage have
    all that is outside of the repeated layers."""
    seconds = [max(0.0, count * phase.layer - phase.border) for count in parts]
    seconds[0] += phase.first if whole[0] else 0.0
    seconds[-1] += phase.last if whole[1] else 0.0
    return seconds


def _ends(
    actions: Sequence[_Action],
    takes: Sequence[Sequence[float]],
    times: ActionTimes,
    ready: Pair,
    stages: int,
) -> list[float]:
    """The end of the last action of each rank. An action without a source has its input at once:
    source -1 is the last element of `inputs`, which stays 0."""
    inner, outer = ((*gaps, NONE, *times.gaps) for gaps in (times.inner, times.gaps))
    begins = 0, len(takes[0]) - 1  # stages whose forward or backward begins outside of the layers
    free, inputs = [0.0] * stages, [0.0] * (len(actions) + 1)
    for number, (kind, rank, before, part, source) in enumerate(actions):
        waits = outer if part == begins[kind] else inner
        start = max(free[rank] + waits[before][kind], inputs[source])
        free[rank] = end = start + takes[kind][part]
        inputs[number] = end + ready[kind]
    return free


@lru_cache(256)
def _actions(name: str, stages: int, count: int, given: int) -> tuple[_Action, ...]:
    """The actions of all ranks in a topological order; empty if chunks are not placed round robin,
    or if actions are split or overlapped."""
    schedule = SCHEDULES.get(name)
    if schedule is None or stages == 1 or schedule.splits_weight_gradient:
        return ()
    chunks = given or schedule.default_chunks
    if 2 * stages * chunks * count > _MOST_ACTIONS:
        return ()
    if schedule.placement(stages, chunks) != round_robin(stages, chunks):
        return ()
    lists = [iter([*schedule.rank_actions(r, stages, count, chunks)]) for r in range(stages)]
    waiting = [next(actions, None) for actions in lists]
    numbers: dict[tuple[int, int, int], int] = {}
    before, ordered = [2] * stages, list[_Action]()
    depth, moved = stages * chunks, True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while (action := waiting[rank]) is not None:
                kind, part = "FB".index(action.kind), action.chunk * stages + rank
                needed = part - 1 if kind == 0 else part + 1
                source = numbers.get((kind, needed, action.microbatch), -1)
                if action.pair is not None:
                    return ()
                if source < 0 and 0 <= needed < depth:
                    break
                numbers[kind, part, action.microbatch] = len(ordered)
                ordered.append(_Action(kind, rank, before[rank], part, source))
                is_last = part == (depth - 1, 0)[kind]
                before[rank], moved = kind + 3 * is_last, True
                waiting[rank] = next(actions, None)
    return tuple(ordered) if not any(waiting) else ()
