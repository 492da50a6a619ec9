"""An exact clock that runs the actions of all ranks by their dependencies.

F of a virtual stage waits for F of the previous stage, B for its own F and for B of the next stage,
W for its own B, all of the same microbatch; and each action waits for the previous one on its rank.
An overlapped pair waits for the dependencies of both actions and ends both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple, TypeAlias

from stagec.schedule.action import Action, Actions, Kind, Placement, stashes, steps
from stagec.schedule.costs import UNIT, Costs, Time
from stagec.support.diagnostics import Diagnostic, DiagnosticError, error, note

#: An action without its rank: kind, virtual stage, microbatch.
ActionKey: TypeAlias = tuple[Kind, int, int]


class Event(NamedTuple):
    """An action with its start and end, in ticks."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class ScheduleEvents:
    """The events of a replay: one row per rank, with times in ticks of `tick` units of the costs.

    Methods give exact times in the unit of the costs.
    """

    rows: tuple[tuple[Event, ...], ...]
    placement: Placement
    tick: Fraction

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def ticks(self) -> int:
        """Ticks from the start of the step to its end."""
        return max((row[-1].end for row in self.rows if row), default=0)

    @property
    def makespan(self) -> Fraction:
        """Time from the start of the step to its end."""
        return self.ticks * self.tick

    def steps(self, rank: int) -> Iterator[tuple[Event, ...]]:
        """The events of a rank: single ones, and those of an overlapped pair together."""
        row = self.rows[rank]
        index = 0
        for step in steps([event.action for event in row]):
            yield row[index : index + len(step)]
            index += len(step)

    def busy(self, rank: int) -> Fraction:
        """Time in which a rank works; an overlapped pair counts once."""
        return sum(step[0].end - step[0].start for step in self.steps(rank)) * self.tick

    def idle(self, rank: int) -> Fraction:
        """Time of the step in which a rank does nothing."""
        return self.makespan - self.busy(rank)

    def idle_in_span(self, rank: int) -> Fraction:
        """Time between a rank's first and last action in which it does nothing."""
        row = self.rows[rank]
        span = row[-1].end - row[0].start if row else 0
        return span * self.tick - self.busy(rank)

    def stashes(self, rank: int, chunk: int | None = None) -> int:
        """The most stashes that a rank has at once, see `stagec.schedule.action.stashes`."""
        return stashes([event.action for event in self.rows[rank]], chunk)

    def in_flight(self, rank: int, chunk: int | None = None) -> Fraction:
        """The most stashes in microbatches of the share of the rank: each of v chunks counts
        1/v."""
        return self.stashes(rank, chunk) * self.placement.share


def replay(
    actions: Actions,
    placement: Placement,
    costs: Costs | Sequence[Costs] = UNIT,
    transfer: Time = 0,
) -> ScheduleEvents:
    """Replay the lists of actions, in linear time.

    `costs` are those of the share of each rank, or one for each virtual stage. `transfer` is the
    time from the end of an action to the start of one that waits for it on another rank. Raises
    `DiagnosticError`, naming ranks and actions, if the lists deadlock or wait for an action that no
    list has.
    """
    clock = _Clock(actions, placement, _Durations.of(placement, costs, transfer))
    return ScheduleEvents(clock.run(), placement, clock.durations.tick)


@dataclass(frozen=True, slots=True)
class _Durations:
    """The costs of each virtual stage in ticks."""

    tick: Fraction
    transfer: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    half_saving: tuple[int, ...]

    @staticmethod
    def of(placement: Placement, costs: Costs | Sequence[Costs], transfer: Time) -> _Durations:
        if transfer < 0:
            raise error(f"the transfer time is {transfer}", remedy="give a time of 0 or more")
        if isinstance(costs, Costs):
            costs = [costs.scaled(placement.share)] * len(placement)
        if len(costs) != len(placement):
            raise error(
                f"{len(costs)} costs for {len(placement)} virtual stages",
                remedy="give one for each virtual stage",
            )
        times = [
            [Fraction(c.forward) for c in costs],
            [Fraction(c.backward) for c in costs],
            [Fraction(c.weight) for c in costs],
            [Fraction(c.forward + c.backward - c.pair) / 2 for c in costs],
        ]
        wire = Fraction(transfer)
        per_unit = lcm(wire.denominator, *(t.denominator for row in times for t in row))
        scaled = [tuple(int(t * per_unit) for t in row) for row in times]
        return _Durations(Fraction(1, per_unit), int(wire * per_unit), *scaled)

    def step(self, works: Sequence[tuple[Action, int]]) -> int:
        """The time of one action, or of a pair: the sum minus half of the saving of each stage."""
        total = sum(self._one(action, stage) for action, stage in works)
        if len(works) > 1:
            total -= sum(self.half_saving[stage] for _, stage in works)
        return max(total, 0)

    def _one(self, action: Action, stage: int) -> int:
        if action.kind == "F":
            return self.forward[stage]
        if action.kind == "W":
            return self.weight[stage]
        return self.backward[stage] - (self.weight[stage] if action.split else 0)


class _Clock:
    """Runs each rank until it has to wait; the end of an action wakes the ranks that wait for
    it."""

    def __init__(self, actions: Actions, placement: Placement, durations: _Durations) -> None:
        self.placement = placement
        self.durations = durations
        self.steps = [list(steps(row)) for row in actions]
        self.position = [0] * len(actions)
        self.rows: list[list[Event]] = [[] for _ in actions]
        self.ends: dict[ActionKey, int] = {}
        self.waiting: dict[ActionKey, list[int]] = {}
        self.ready = deque(range(len(actions)))

    def run(self) -> tuple[tuple[Event, ...], ...]:
        while self.ready:
            self._advance(self.ready.popleft())
        if self.waiting:
            raise _deadlock(self)
        return tuple(map(tuple, self.rows))

    def _advance(self, rank: int) -> None:
        row, todo = self.rows[rank], self.steps[rank]
        clock = row[-1].end if row else 0
        while self.position[rank] < len(todo):
            step = todo[self.position[rank]]
            works = [(action, self.placement.stage(rank, action.chunk)) for action in step]
            start = self._start(rank, clock, works)
            if start is None:
                return
            clock = start + self.durations.step(works)
            for action, stage in works:
                row.append(Event(action, start, clock))
                self._finish((action.kind, stage, action.microbatch), clock)
            self.position[rank] += 1

    def _start(self, rank: int, start: int, works: Sequence[tuple[Action, int]]) -> int | None:
        for action, stage in works:
            for need in needs(self.placement, action, stage):
                end = self.ends.get(need)
                if end is None:
                    self.waiting.setdefault(need, []).append(rank)
                    return None
                away = self.placement[need[1]].rank != rank
                start = max(start, end + self.durations.transfer if away else end)
        return start

    def _finish(self, work: ActionKey, end: int) -> None:
        self.ends[work] = end
        self.ready.extend(self.waiting.pop(work, ()))


def needs(placement: Placement, action: Action, stage: int) -> Iterator[ActionKey]:
    """The actions for which an action on a virtual stage waits, besides the order of its rank."""
    if action.kind == "F":
        before = placement.previous(stage)
        if before is not None:
            yield "F", before, action.microbatch
        return
    if action.kind == "W":
        yield "B", stage, action.microbatch
        return
    yield "F", stage, action.microbatch
    after = placement.following(stage)
    if after is not None:
        yield "B", after, action.microbatch


def _deadlock(clock: _Clock) -> DiagnosticError:
    """The error for a ring of ranks that wait for each other, or for an action that no rank has."""
    awaited = {rank: work for work, ranks in clock.waiting.items() for rank in ranks}
    path: list[int] = []
    rank = min(awaited)
    while rank not in path:
        path.append(rank)
        kind, stage, microbatch = awaited[rank]
        rank, chunk = clock.placement[stage]
        wanted = kind, chunk, microbatch
        rest = clock.steps[rank][clock.position[rank] :]
        if wanted not in {(a.kind, a.chunk, a.microbatch) for step in rest for a in step}:
            return _missing(clock, path[-1], awaited[path[-1]])
    ring = path[path.index(rank) :]
    shown = " -> ".join(map(str, [*ring, rank]))
    return error(
        f"the schedule deadlocks: ranks wait for each other in a ring, {shown}",
        remedy="order the actions so that each comes after what it needs on every rank",
        notes=[_waits(clock, r, awaited[r]) for r in ring],
    )


def _waits(clock: _Clock, rank: int, work: ActionKey) -> Diagnostic:
    at = " & ".join(map(str, clock.steps[rank][clock.position[rank]]))
    home = clock.placement[work[1]]
    wanted = Action(work[0], home.chunk, work[2])
    where = "later on the same rank" if home.rank == rank else f"on rank {home.rank}"
    return note(f"rank {rank} is at {at} and waits for {wanted} {where}")


def _missing(clock: _Clock, rank: int, work: ActionKey) -> DiagnosticError:
    home = clock.placement[work[1]]
    wanted = Action(work[0], home.chunk, work[2])
    return error(
        f"the schedule is incomplete: rank {home.rank} never performs {wanted}",
        remedy=f"add it to the list of rank {home.rank}",
        notes=[_waits(clock, rank, work)],
    )
