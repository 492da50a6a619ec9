"""How long the steps of a server take, of very many steps: between those of a grid, which are
evaluated exactly, each when it is first needed.

With n sequences that decode behind c cached tokens on average, and k chunks of p tokens behind q
cached ones, a step takes

    T = H(n, k, p) + [F(n, c) - F(n, 1)] + [G(k, p, q) - G(k, p, 0)]

F is a step that only decodes, G one that only prefills, and H has both, behind one cached token and
none: attention over what is cached is a kernel of its own, which takes as long in any step. F, G
and H are exact where all of their arguments are of the grid, and linear in each between its points.
k chunks of unequal sizes count as k equal ones of as many tokens, and pairs of a query and a key,
together; each counts as one that ends its prompt. Groups of ranks wait for each other, so chunks
are those of the group that has most (`_fullest`). `stagec.jobs.step_times` has the exact times, and
`StepSurface.check` compares.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stagec.serving.step import SequenceClass, Step, mean_chunk, mean_class, step_of
from stagec.serving.step_times import StepLine

#: The largest number of a grid, and its least ones: those of cached tokens and of chunks.
_LARGEST = 1 << 40
_CONTEXTS, _CHUNKS = 16, 16
#: Steps of each kind that are kept to be checked.
_CHECKED = 6

T = TypeVar("T")
Key = tuple[int, int, int, int, int]  # n, c, k, p, q


@dataclass(frozen=True, slots=True)
class SurfaceCheck:
    """Steps of a run beside their exact times: how many, and the relative errors."""

    steps: int
    median: float
    largest: float


def grid(points: int, least: int = 1) -> list[int]:
    """Numbers from `least` on, so many in each doubling, evenly: 4, 6, 8, 12 with two."""
    sizes = [least]
    while sizes[-1] < _LARGEST:
        base = sizes[-1]
        sizes += sorted({base + max(1, base * i // points) for i in range(1, points)} | {2 * base})
        sizes = list(dict.fromkeys(sizes))
    return sizes


@dataclass
class StepSurface:
    """Femtoseconds of steps (`stagec.serving.step_times.StepCosts`). `exact` is asked for the steps
    of the grid, `points` in each doubling. Of `groups` of ranks that wait for each other each has
    its share of the sequences of a step, rounded up. Where these are `halves` of batches, each has
    a part of a prompt, one behind the other."""

    exact: Callable[[Step], int]
    points: int = 2
    groups: int = 1
    halves: int = 1
    seed: int = 0
    _known: dict[Key, int] = field(default_factory=dict[Key, int])
    _lines: dict[tuple[int, int], StepLine] = field(default_factory=dict[tuple[int, int], StepLine])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._counts = grid(self.points)
        self._contexts = [1, *grid(self.points, _CONTEXTS)]
        self._sizes = [1, 2, *grid(self.points, _CHUNKS)]
        self._pasts = [0, *grid(self.points, _CONTEXTS)]
        self._decodes = _Sample[tuple[int, int]](self._random)
        self._mixes = _Sample[tuple[int, int, tuple[tuple[int, int], ...]]](self._random)

    @property
    def evaluations(self) -> int:
        """How many steps were evaluated exactly."""
        return len(self._known)

    def decode(self, count: int, total: int) -> StepLine:
        self._decodes.offer((count, total))
        return self._line(count, total)

    def _line(self, count: int, total: int) -> StepLine:
        cell = bisect_right(self._contexts, max(1, total // count)) - 1
        line = self._lines.get((count, cell))
        if line is None:
            low, high = self._contexts[cell], self._contexts[cell + 1]
            share = -(-count // self.groups)
            at, then = (round(self._decode(share, c)) for c in (low, high))
            slope = round((then - at) / (count * (high - low)))
            line = self._lines[count, cell] = StepLine(at, slope, count * low, count * high)
        return line

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        self._mixes.offer((count, total, tuple(chunks)))
        return self._mixed(count, total, chunks)

    def _mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        number, size, past = mean_chunk(_fullest(chunks, self.groups, self.halves))
        share = -(-count // self.groups)
        picoseconds = self._chunked(share, number, size)
        if count:
            picoseconds += self._decode(share, max(1.0, total / count)) - self._decode(share, 1)
        if past:
            picoseconds += self._prefill(number, size, past) - self._prefill(number, size, 0)
        return max(1, round(picoseconds))

    # -- between the points ------------------------------------------------------------------------

    def _decode(self, count: int, context: float) -> float:
        return sum(
            w * v * self._at(n, c, 0, 0, 0)
            for n, w in _between(self._counts, count)
            for c, v in _between(self._contexts, context)
        )

    def _prefill(self, number: int, size: float, past: float) -> float:
        return sum(
            w * v * u * self._at(0, 0, k, p, q)
            for k, w in _between(self._counts, number)
            for p, v in _between(self._sizes, size)
            for q, u in _between(self._pasts, past)
        )

    def _chunked(self, count: int, number: int, size: float) -> float:
        return sum(
            w * v * u * self._at(n, 1 if n else 0, k, p, 0)
            for n, w in (_between(self._counts, count) if count else ((0, 1.0),))
            for k, v in _between(self._counts, number)
            for p, u in _between(self._sizes, size)
        )

    def _at(self, count: int, context: int, number: int, size: int, past: int) -> int:
        key = count, context, number, size, past
        picoseconds = self._known.get(key)
        if picoseconds is None:
            classes = [SequenceClass(1, context, 1, count)] if count else []
            classes += [SequenceClass(size, past, 1, number)] if number else []
            picoseconds = self._known[key] = self.exact(step_of(classes))
        return picoseconds

    # -- beside the exact ones ---------------------------------------------------------------------

    def check(self) -> SurfaceCheck:
        """Some of the steps that were asked for, drawn by the seed, beside their exact times."""
        errors: list[float] = []
        for count, total in self._decodes.kept:
            step = _step(count, total, (), self.groups, self.halves)
            errors.append(self._line(count, total).time(total) / self.exact(step) - 1)
        for count, total, chunks in self._mixes.kept:
            step = _step(count, total, chunks, self.groups, self.halves)
            errors.append(self._mixed(count, total, chunks) / self.exact(step) - 1)
        sizes = sorted(map(abs, errors))
        if not sizes:
            return SurfaceCheck(0, 0.0, 0.0)
        return SurfaceCheck(len(sizes), sizes[len(sizes) // 2], sizes[-1])


class _Sample(Generic[T]):
    """Some of many things, each with the same chance."""

    def __init__(self, source: random.Random) -> None:
        self.kept: list[T] = []
        self._source, self._seen = source, 0

    def offer(self, thing: T) -> None:
        """Keep a thing, or not."""
        self._seen += 1
        if len(self.kept) < _CHECKED:
            self.kept.append(thing)
        elif (place := int(self._source.random() * self._seen)) < _CHECKED:
            self.kept[place] = thing


@dataclass
class ExactSteps:
    """Femtoseconds of steps, each evaluated: sequences that decode are one class of their mean
    context, and chunks another one, as in `StepSurface`."""

    exact: Callable[[Step], int]
    groups: int = 1
    halves: int = 1
    _known: dict[Step, int] = field(default_factory=dict[Step, int])

    @property
    def evaluations(self) -> int:
        """How many steps were evaluated."""
        return len(self._known)

    def decode(self, count: int, total: int) -> StepLine:
        return StepLine(self._time(_step(count, total, (), self.groups, 1)), 0, total, total)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        return self._time(_step(count, total, chunks, self.groups, self.halves))

    def _time(self, step: Step) -> int:
        picoseconds = self._known.get(step)
        if picoseconds is None:
            picoseconds = self._known[step] = self.exact(step)
        return picoseconds

    def check(self) -> SurfaceCheck:
        """All steps are exact."""
        return SurfaceCheck(0, 0.0, 0.0)


@dataclass
class DraftedSteps:
    """Femtoseconds of steps of which those that only decode verify drafts (`drafted`: of a token
    that such a step gives each sequence), and others do not (`plain`)."""

    drafted: StepSurface | ExactSteps
    plain: StepSurface | ExactSteps

    @property
    def evaluations(self) -> int:
        """How many steps were evaluated."""
        return self.drafted.evaluations + self.plain.evaluations

    def decode(self, count: int, total: int) -> StepLine:
        return self.drafted.decode(count, total)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        return self.plain.mixed(count, total, chunks)

    def check(self) -> SurfaceCheck:
        """That of both."""
        one, other = self.drafted.check(), self.plain.check()
        steps = one.steps + other.steps
        return SurfaceCheck(steps, max(one.median, other.median), max(one.largest, other.largest))


def _step(
    count: int, total: int, chunks: Sequence[tuple[int, int]], groups: int, halves: int
) -> Step:
    """The step of the group that has most, whose chunks end prompts: sequences that decode have
    their mean context, rounded up, and chunks have their mean size (`mean_class`)."""
    share = -(-count // groups)
    classes = [SequenceClass(1, -(-total // count), 1, share)] if count else []
    if chunks:
        classes.append(mean_class(_fullest(chunks, groups, halves)))
    return step_of(classes)


def _fullest(
    chunks: Sequence[tuple[int, int]], groups: int, halves: int
) -> Sequence[tuple[int, int]]:
    """The chunks of the group that has most, if the largest ones are dealt to groups first, each
    in as many parts as there are `halves` of batches."""
    if halves > 1:
        parts = ((new, past, -(-new // halves)) for new, past in chunks)
        chunks = [
            (min(size, new - at), past + at)
            for new, past, size in parts
            for at in range(0, new, size)
        ]
    return sorted(chunks, reverse=True)[::groups]


def _between(points: Sequence[int], value: float) -> Sequence[tuple[int, float]]:
    """The points around a value and their weights; the least point below it."""
    place = bisect_right(points, value) - 1
    if place < 0:
        return ((points[0], 1.0),)
    low = points[place]
    if low == value:
        return ((low, 1.0),)
    high = points[place + 1]
    share = (value - low) / (high - low)
    return (low, 1.0 - share), (high, share)
