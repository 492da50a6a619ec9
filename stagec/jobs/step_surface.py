"""The times of very many steps of a server, interpolated on a grid whose steps are evaluated
exactly, each when it is first needed.

A step in which n sequences decode after c cached tokens on average, with k chunks of p tokens after
q cached ones, takes

    T = H(n, k, p) + [F(n, c) - F(n, 1)] + [G(k, p, q) - G(k, p, 0)]

F is a step that only decodes, G one that only prefills, and H has both, after one cached token and
none: attention over cached tokens is a kernel of its own, which takes as long in any step. F, G and
H are exact if all of their arguments are points of the grid, and linear in each argument between
points. Chunks of unequal sizes count as equal ones with the same sums of tokens and of pairs of a
query and a key (`mean_chunk`); each counts as one that ends its prompt. Groups of ranks wait for
each other, so the chunks are those of the group with most (`_fullest`). `ExactSteps` evaluates each
step; `StepSurface.check` compares.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stagec.serving.step import SequenceClass, Step, mean_chunk, mean_class, step_of
from stagec.serving.step_times import StepLine

#: The largest number of a grid, and the least ones of the grids of cached tokens and of chunks.
_LARGEST = 1 << 40
_CONTEXTS, _CHUNKS = 16, 16
#: The number of steps of each kind that are checked.
_CHECKED = 6

T = TypeVar("T")
Key = tuple[int, int, int, int, int]  # n, c, k, p, q


@dataclass(frozen=True, slots=True)
class SurfaceCheck:
    """The comparison of steps with their exact times: their number, and the median and largest
    relative errors."""

    steps: int
    median: float
    largest: float


def grid(points: int, least: int = 1) -> list[int]:
    """Numbers from `least` on, with `points` evenly spaced ones in each doubling: 4, 6, 8, 12 with
    two."""
    sizes = [least]
    while sizes[-1] < _LARGEST:
        base = sizes[-1]
        sizes += sorted({base + max(1, base * i // points) for i in range(1, points)} | {2 * base})
        sizes = list(dict.fromkeys(sizes))
    return sizes


@dataclass
class StepSurface:
    """Femtoseconds of steps (`stagec.serving.step_times.StepCosts`). `exact` evaluates the steps of
    the grid, which has `points` points in each doubling. Each of `groups` groups of ranks, which
    wait for each other, has its share of the sequences of a step, rounded up. If groups are
    `halves` of batches, each has a part of a prompt, one after the other."""

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
        """The number of steps that were evaluated exactly."""
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
        picoseconds = sum(
            w * v * u * self._at(n, 1 if n else 0, k, p, 0)
            for n, w in (_between(self._counts, share) if share else ((0, 1.0),))
            for k, v in _between(self._counts, number)
            for p, u in _between(self._sizes, size)
        )
        if count:
            picoseconds += self._decode(share, max(1.0, total / count)) - self._decode(share, 1)
        if past:
            picoseconds += self._prefill(number, size, past) - self._prefill(number, size, 0)
        return max(1, round(picoseconds))

    # -- interpolation -----------------------------------------------------------------------------

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

    def _at(self, count: int, context: int, number: int, size: int, past: int) -> int:
        key = count, context, number, size, past
        picoseconds = self._known.get(key)
        if picoseconds is None:
            classes = [SequenceClass(1, context, 1, count)] if count else []
            classes += [SequenceClass(size, past, 1, number)] if number else []
            picoseconds = self._known[key] = self.exact(step_of(classes))
        return picoseconds

    # -- comparison --------------------------------------------------------------------------------

    def check(self) -> SurfaceCheck:
        """Compare some of the steps that were needed, drawn with the seed, with exact times."""
        errors: list[float] = []
        for count, total in self._decodes.items:
            step = _step(count, total, (), self.groups, self.halves)
            errors.append(self._line(count, total).time(total) / self.exact(step) - 1)
        for count, total, chunks in self._mixes.items:
            step = _step(count, total, chunks, self.groups, self.halves)
            errors.append(self._mixed(count, total, chunks) / self.exact(step) - 1)
        sizes = sorted(map(abs, errors))
        if not sizes:
            return SurfaceCheck(0, 0.0, 0.0)
        return SurfaceCheck(len(sizes), sizes[len(sizes) // 2], sizes[-1])


class _Sample(Generic[T]):
    """A uniform sample of a stream of items (Vitter, "Random sampling with a reservoir", 1985,
    algorithm R)."""

    def __init__(self, source: random.Random) -> None:
        self.items: list[T] = []
        self._source, self._count = source, 0

    def offer(self, item: T) -> None:
        """Add an item of the stream."""
        self._count += 1
        if len(self.items) < _CHECKED:
            self.items.append(item)
        elif (place := int(self._source.random() * self._count)) < _CHECKED:
            self.items[place] = item


@dataclass
class ExactSteps:
    """Femtoseconds of steps, each evaluated exactly: sequences that decode are one class with their
    mean context, and chunks another one, as in `StepSurface`."""

    exact: Callable[[Step], int]
    groups: int = 1
    halves: int = 1
    _known: dict[Step, int] = field(default_factory=dict[Step, int])

    @property
    def evaluations(self) -> int:
        """The number of steps that were evaluated."""
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
        """Nothing to compare: all steps are exact."""
        return SurfaceCheck(0, 0.0, 0.0)


@dataclass
class SharedSteps:
    """Femtoseconds of steps of groups of ranks that share some work, such as experts (`whole`).
    `shared` are those of this work, `alone` those of the rest, where it runs on ranks of its own.

    Groups decode equal shares of the sequences, but each prompt is in one of them. What a group
    does by itself takes as long as in the group with most tokens, f, and shared work has the mean
    of all groups, m: T = whole(f) - shared(f) + shared(m), and at least whole(m). On ranks of its
    own shared work takes no time while the rest lasts: max(alone(f), shared) in place of shared.
    """

    whole: StepSurface | ExactSteps
    shared: StepSurface | ExactSteps
    alone: StepSurface | ExactSteps | None = None

    @property
    def evaluations(self) -> int:
        """The number of steps that were evaluated."""
        return self.whole.evaluations

    def decode(self, count: int, total: int) -> StepLine:
        return self.whole.decode(count, total)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        groups, halves = self.whole.groups, self.whole.halves
        share, fullest = -(-count // groups), _fullest(chunks, groups, halves)
        most, every = (sum(new for new, _ in some) for some in (fullest, chunks))
        mean = [(-(-new * every // (most * groups)), past) for new, past in fullest]
        least = self.alone.mixed(count, total, chunks) if self.alone is not None else 0
        f, m = (max(least, self.shared.mixed(share, share, some)) for some in (fullest, mean))
        equal = [(halves * new, past) for new, past in mean for _ in range(groups // halves)]
        took = self.whole.mixed(count, total, chunks) - max(0, f - m)
        return max(took, self.whole.mixed(count, total, equal))

    def check(self) -> SurfaceCheck:
        """The comparison of whole steps."""
        return self.whole.check()


@dataclass
class DraftedSteps:
    """Femtoseconds of steps with speculative decoding: steps that only decode verify drafts
    (`drafted`, by generated token of a sequence), others do not (`plain`)."""

    drafted: StepSurface | ExactSteps
    plain: StepSurface | ExactSteps | SharedSteps

    @property
    def evaluations(self) -> int:
        """The number of steps that were evaluated."""
        return self.drafted.evaluations + self.plain.evaluations

    def decode(self, count: int, total: int) -> StepLine:
        return self.drafted.decode(count, total)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        return self.plain.mixed(count, total, chunks)

    def check(self) -> SurfaceCheck:
        """The comparison of both kinds of steps; errors are the larger ones."""
        one, other = self.drafted.check(), self.plain.check()
        steps = one.steps + other.steps
        return SurfaceCheck(steps, max(one.median, other.median), max(one.largest, other.largest))


def _step(
    count: int, total: int, chunks: Sequence[tuple[int, int]], groups: int, halves: int
) -> Step:
    """The step of the group with most, whose chunks end prompts: sequences that decode have their
    mean context, rounded up, and chunks have their mean size (`mean_class`)."""
    share = -(-count // groups)
    classes = [SequenceClass(1, -(-total // count), 1, share)] if count else []
    if chunks:
        classes.append(mean_class(_fullest(chunks, groups, halves)))
    return step_of(classes)


def _fullest(
    chunks: Sequence[tuple[int, int]], groups: int, halves: int
) -> Sequence[tuple[int, int]]:
    """The chunks of the group with most, if chunks are distributed to groups from the largest on,
    each divided into `halves` parts."""
    if halves > 1:
        parts = ((new, past, -(-new // halves)) for new, past in chunks)
        chunks = [
            (min(size, new - at), past + at)
            for new, past, size in parts
            for at in range(0, new, size)
        ]
    return sorted(chunks, reverse=True)[::groups]


def _between(points: Sequence[int], value: float) -> Sequence[tuple[int, float]]:
    """The points around a value, with their weights; the least point for a value below it."""
    place = bisect_right(points, value) - 1
    if place < 0:
        return ((points[0], 1.0),)
    low = points[place]
    if low == value:
        return ((low, 1.0),)
    high = points[place + 1]
    share = (value - low) / (high - low)
    return (low, 1.0 - share), (high, share)
