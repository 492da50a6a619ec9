"""The peak of a step: the memory of one rank at the highest moment of its schedule.

An action is analyzed once for each state of its microbatch (the actions that have run before). The
schedule then determines the memory that the other microbatches keep meanwhile. The two actions of
an overlapped pair may both be at their highest moment.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stagec.ir.core import Operation
from stagec.memory.buffers import Buffer, Lifetimes, RunOp
from stagec.schedule.action import Action, RankActions, steps
from stagec.schedule.attached import regions_of
from stagec.support.memo import memo_method

#: Kind and chunk of an action, such as ("forward", 0); a state is the set of those that have run.
ActionRegion = tuple[str, int]
MicrobatchState = frozenset[ActionRegion]
_NOTHING: MicrobatchState = frozenset()
_FIRST = "first_"
#: An action in the state of its microbatch: the regions that it runs, and those run before; where
#: no microbatch has run a region that makes sums of gradients, `first_run` of it as well.
ActionInState = tuple[tuple[ActionRegion, ...], MicrobatchState]
#: A work, and the state of its microbatch after it.
_WorkDone = tuple[ActionInState, MicrobatchState]


#: The steps of a work, or those outside of actions, each with the buffers that end after it.
MemoryRun = Sequence[tuple[RunOp, tuple[Buffer, ...]]]


def first_run(region: ActionRegion) -> ActionRegion:
    """The mark that no microbatch has run a region before. As a state by itself it stands for the
    sums of gradients that the first run allocates."""
    kind, chunk = region
    return _FIRST + kind, chunk


def is_first_run(region: ActionRegion) -> bool:
    """Whether a region is a `first_run`."""
    return region[0].startswith(_FIRST)


def first_runs(work: ActionInState) -> list[MicrobatchState]:
    """The states that stand for the sums which the first runs of a work allocate."""
    return [frozenset((r,)) for r in work[0] if is_first_run(r)]


def after_work(work: ActionInState) -> MicrobatchState:
    """The state of the microbatch after a work."""
    runs, before = work
    return before.union(r for r in runs if not is_first_run(r))


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment at which the step at index `place` of a run executes."""

    run: MemoryRun
    place: int

    @property
    def step(self) -> RunOp:
        """The step that executes."""
        return self.run[self.place][0]

    @property
    def made(self) -> frozenset[Buffer]:
        """The live buffers that were allocated since the start of the run."""
        made = {b for step, _ in self.run[: self.place + 1] for b in step.made}
        return frozenset(made - self._ended())

    @property
    def gone(self) -> frozenset[Buffer]:
        """The buffers that existed at the start of the run and have ended."""
        made = {b for step, _ in self.run[: self.place] for b in step.made}
        return frozenset(self._ended() - made)

    def _ended(self) -> set[Buffer]:
        return {b for _, ends in self.run[: self.place] for b in ends}


def highest(runs: Iterable[MemoryRun], size: Callable[[Buffer], int]) -> Moment | None:
    """The first moment of these runs with the most bytes beyond those at the start of the run, by
    the sizes of buffers; None if nothing runs."""
    best: Moment | None = None
    most = 0
    for run in runs:
        live = 0
        for place, (step, ends) in enumerate(run):
            live += sum(map(size, step.made))
            if step.counts and (best is None or live > most):
                best, most = Moment(run, place), live
            live -= sum(map(size, ends))
    return best


@dataclass(frozen=True, slots=True)
class Doing:
    """A turn of a schedule: the work that runs (two of an overlapped pair), its actions, and the
    number of microbatches in each state before it."""

    works: tuple[ActionInState, ...]
    actions: tuple[Action, ...]
    states: Mapping[MicrobatchState, int]

    def after(self) -> Iterator[Mapping[MicrobatchState, int]]:
        """The number of microbatches in each state after each of the works, in order."""
        counts = Counter(self.states)
        for work in self.works:
            _, before = work
            if before in counts:
                counts[before] -= 1
            counts[after_work(work)] += 1
            counts.update(first_runs(work))
            yield {s: n for s, n in counts.items() if n}


def labels(part: Operation | None) -> ActionRegion | None:
    """An action's kind and chunk."""
    return (part.text("kind"), part.integer("chunk")) if part is not None else None


def turns(
    order: RankActions,
    known: Iterable[ActionRegion],
    summed: frozenset[ActionRegion] = frozenset(),
    *,
    holds: Callable[[MicrobatchState], bool] | None = None,
) -> Iterator[Doing]:
    """The turns of the schedule of a rank. Only `known` regions of an action run, and the first run
    of a region in `summed` allocates sums of gradients.

    `holds` states whether a microbatch in a state keeps any buffer. With it, only the first of
    turns with equal works and kept buffers is yielded: one period of a steady state.
    """
    works_of = _Works(frozenset(known), summed)
    made = _NOTHING
    done: dict[int, MicrobatchState] = {}
    counts: Mapping[MicrobatchState, int] = {}
    same = {frozenset(counts.items()): counts}  # one object for equal counts, so `id` tells them
    following: dict[tuple[int, ...], Mapping[MicrobatchState, int]] = {}
    for pair in steps(order):
        works: list[_WorkDone] = []
        for action in pair:
            works.append(works_of(action, done.get(action.microbatch, _NOTHING), made))
            if len(made) < len(summed):  # else every sum is there
                made = made.union(filter(is_first_run, works[-1][0][0]))
        key = (id(counts), *map(id, works))
        if holds is None or key not in following:
            doing = Doing(tuple([work for work, _ in works]), pair, counts)
            yield doing
            if key not in following:
                *_, after = doing.after()
                after = {s: n for s, n in after.items() if holds is None or holds(s)}
                following[key] = same.setdefault(frozenset(after.items()), after)
        counts = following[key]
        for action, (_, state) in zip(pair, works, strict=True):
            done[action.microbatch] = state


class _Works:
    """The works of actions, each with the state after it. Equal works are one object: a schedule
    has thousands of actions and few works."""

    def __init__(self, regions: frozenset[ActionRegion], summed: frozenset[ActionRegion]) -> None:
        self._regions, self._summed = regions, summed
        self._states = {_NOTHING: _NOTHING}
        self._same: dict[ActionInState, _WorkDone] = {}
        self._lives: dict[tuple[str, int, bool, int, int], _WorkDone] = {}

    def __call__(self, a: Action, before: MicrobatchState, made: MicrobatchState) -> _WorkDone:
        key = a.kind, a.chunk, a.split, id(before), len(made)
        known = self._lives.get(key)
        if known is None:
            run = tuple(r for r in regions_of(a) if r in self._regions)
            firsts = (first_run(r) for r in run if r in self._summed and first_run(r) not in made)
            after, work = before | frozenset(run), ((*run, *firsts), before)
            done = work, self._states.setdefault(after, after)
            known = self._lives[key] = self._same.setdefault(work, done)
        return known


class Planner:
    """The buffers that the actions of a function allocate, keep and free, from its lifetimes."""

    def __init__(self, lives: Lifetimes) -> None:
        self._lives = lives
        self._parts = {labels(s.part): s.part for s in lives.steps}
        self._steps: dict[Operation | None, list[int]] = {}
        for number, step in enumerate(lives.steps):
            self._steps.setdefault(step.part, []).append(number)
        self._used: dict[Operation | None, list[Buffer]] = {}
        #: The buffers that other parts use than the one that makes them, with all parts that do.
        self._left: list[tuple[Buffer, set[Operation | None]]] = []
        for buffer in lives.buffers:
            users = buffer.users
            for part in users:
                self._used.setdefault(part, []).append(buffer)
            if buffer.part is not None and users != {buffer.part}:
                self._left.append((buffer, users))
        self._sums: dict[ActionRegion, dict[Buffer, Buffer]] = {}
        for buffer, made in lives.sums.items():
            if (region := labels(buffer.part)) is not None:
                self._sums.setdefault(first_run(region), {})[buffer] = made

    @property
    def buffers(self) -> Sequence[Buffer]:
        """All buffers that are not static."""
        return self._lives.buffers

    @property
    def regions(self) -> frozenset[ActionRegion]:
        """Kinds and chunks of the actions."""
        return frozenset(r for r in self._parts if r is not None)

    @property
    def summed(self) -> frozenset[ActionRegion]:
        """The regions whose first run allocates sums of gradients."""
        return frozenset(r for r in self.regions if first_run(r) in self._sums)

    @memo_method
    def kept(self, state: MicrobatchState) -> frozenset[Buffer]:
        """The buffers that a microbatch in this state keeps, or the sums after a first run."""
        if any(map(is_first_run, state)):
            return frozenset(b for r in state for b in self._sums[r].values())
        done = {self._parts[r] for r in state}
        return frozenset(b for b, users in self._left if b.part in done and not users <= done)

    def around(self) -> frozenset[Buffer]:
        """The buffers from outside of the actions that live while the schedule runs."""
        run = self.run(None)
        place = next((i for i, (step, _) in enumerate(run) if self.is_scheduled(step)), 0)
        return Moment(run, place).made

    def ending(
        self, parts: Sequence[Operation | None], done: set[Operation | None]
    ) -> Mapping[int, list[Buffer]]:
        """Maps the number of a step of these parts to the buffers that end after it, if all parts
        in `done` have run by the end."""
        ending: dict[int, list[Buffer]] = {}
        for place, part in enumerate(parts):
            later = parts[place + 1 :]
            for buffer in self._used.get(part, ()):
                last, split = buffer.last, buffer.split
                number = last.get(part)
                if len(parts) == 1:
                    number = split.get(part, number)
                if number is None or any(p in last for p in later):
                    continue
                if last.keys() <= done and split.keys() <= done:
                    ending.setdefault(number, []).append(buffer)
        return ending

    @memo_method
    def run(self, work: ActionInState | None) -> MemoryRun:
        """The steps of a work, or those outside of actions, each with the buffers that end after
        it."""
        runs, before = work or ((), MicrobatchState())
        parts = [self._parts[r] for r in runs if not is_first_run(r)] if work else [None]
        run: MemoryRun = self._between(parts, {self._parts[r] for r in before} | set(parts))
        for sums in (self._sums[r] for r in runs if is_first_run(r)):
            made = [replace(step, made=[sums.get(b, b) for b in step.made]) for step, _ in run]
            ended = [tuple(b for b in ends if b not in sums) for _, ends in run]
            run = tuple(zip(made, ended, strict=True))
        return run

    def alone(self) -> Iterator[MemoryRun]:
        """The run of each action by itself, after all others of its microbatch."""
        done = set(self._parts.values())
        for part in (p for p in self._parts.values() if p is not None):
            yield self._between([part], done)

    def _between(self, parts: Sequence[Operation | None], done: set[Operation | None]) -> MemoryRun:
        ending, steps_ = self.ending(parts, done), self._lives.steps
        numbers = (n for p in parts for n in self._steps.get(p, ()))
        return tuple((steps_[n], tuple(ending.get(n, ()))) for n in numbers)

    def is_scheduled(self, step: RunOp) -> bool:
        """Whether the actions of a schedule run right after a step."""
        at = self._lives.scheduled
        return at is not None and step is self._lives.steps[at]
