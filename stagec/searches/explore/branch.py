"""Branch and bound: the best of many points by lower bounds and exact values.

    bounds   1.0  1.2  1.5  2.0  3.0
    exact    1.4  1.3   -    -    -       best: 1.3; no other can be better than 1.5

Bounds are refined before their points are tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")
#: The number of points that are refined at a time, for each that is evaluated at a time.
_REFINED = 8


@dataclass(frozen=True, slots=True)
class Ranked(Generic[T]):
    """An evaluated point: its number, its value (less is better), its evaluation, and a second
    value that ranks points of equal value."""

    number: int
    value: float
    what: T
    second: float = 0.0

    @property
    def order(self) -> tuple[float, float, int]:
        """A key for sorting: the better first; of equal points the first one of the space."""
        return self.value, self.second, self.number


class Search(Generic[T]):
    """Finds the best `wanted` points by bounds.

    No point that was not tried has a smaller value than `proven`; `left` points may still be among
    the best. Points of equal value are all tried, and ranked by `second`, less being better.
    """

    def __init__(
        self,
        bounds: Mapping[int, float],
        wanted: int,
        second: Callable[[T], float] = lambda what: 0.0,
    ) -> None:
        self.best: list[Ranked[T]] = []
        self.tried = self.refused = 0
        self._wanted, self._second = wanted, second
        self._open = [(bound, number) for number, bound in bounds.items()]
        heapify(self._open)

    @property
    def worst(self) -> float:
        """The value that a point must not exceed to be among the best."""
        return self.best[-1].value if len(self.best) == self._wanted else float("inf")

    @property
    def proven(self) -> float:
        """A lower bound of the values of all points that were not tried."""
        return self._open[0][0] if self._open else float("inf")

    @property
    def left(self) -> int:
        """The number of points that may still be among the best."""
        return sum(bound <= self.worst for bound, _ in self._open)

    def next(self, most: int) -> list[tuple[int, float]]:
        """The most promising points that may still be among the best, with their bounds."""
        chosen: list[tuple[int, float]] = []
        while self._open and len(chosen) < most and self._open[0][0] <= self.worst:
            bound, number = heappop(self._open)
            chosen.append((number, bound))
        return chosen

    def put_back(self, bounds: Iterable[tuple[int, float]]) -> None:
        """Return points that were not tried, with tighter bounds."""
        for number, bound in bounds:
            heappush(self._open, (bound, number))

    def learn(self, number: int, value: float | None, what: T) -> None:
        """Add an evaluated point; a value of None means that it is invalid or does not fit."""
        self.tried += 1
        if value is None:
            self.refused += 1
            return
        best = [*self.best, Ranked(number, value, what, self._second(what))]
        self.best = sorted(best, key=lambda f: f.order)[: self._wanted]

    def run(
        self,
        refine: Callable[[Sequence[int]], Mapping[int, float | None]],
        evaluate: Callable[[Sequence[int]], Iterable[tuple[int, float | None, T]]],
        at_a_time: int,
    ) -> Iterator[int]:
        """Refine and evaluate until no point that is left can be among the best; yields the number
        of points tried so far. `refine` returns tighter bounds for points that have them, and None
        for points that are dropped. The first points are evaluated when none of them has tighter
        bounds, and no more of them at a time than are still wanted."""
        while batch := self.next(_REFINED * at_a_time):
            better = refine([n for n, _ in batch])
            lacking = self._wanted - len(self.best)
            first = {n for n, _ in batch[: min(at_a_time, lacking or at_a_time)]}
            ready = [] if first & better.keys() else [*first]
            bounds = {**dict(batch), **better}
            self.put_back((n, b) for n, b in bounds.items() if b is not None and n not in ready)
            for number, value, what in evaluate(ready):
                self.learn(number, value, what)
                yield self.tried


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one is at least as good in all respects and better in one.

    | one    | other  | beats |
    |--------|--------|-------|
    | (1, 5) | (2, 5) | yes   |
    | (1, 5) | (1, 5) | no    |
    | (1, 5) | (2, 4) | no    |
    """
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


class Front(Generic[T]):
    """Finds the Pareto front: all points that no other beats. A point is not tried if one that was
    tried beats its bounds."""

    def __init__(self, bounds: Mapping[int, tuple[float, ...]]) -> None:
        self._bounds = bounds
        self._open = sorted(bounds, key=lambda n: (bounds[n], n))
        self._values: dict[int, tuple[float, ...]] = {}
        self._what: dict[int, T] = {}
        self.tried = 0

    @property
    def best(self) -> list[Ranked[T]]:
        """The front, sorted by the first respect."""
        values = self._values
        kept = [n for n, v in values.items() if not any(beats(w, v) for w in values.values())]
        kept.sort(key=lambda n: (values[n], n))
        return [Ranked(n, values[n][0], self._what[n]) for n in kept]

    @property
    def proven(self) -> float:
        """A lower bound, in the first respect, of all points that were not tried."""
        return self._bounds[self._open[0]][0] if self._open else float("inf")

    @property
    def left(self) -> int:
        """The number of points that may still be on the front."""
        return sum(not self._is_beaten(n) for n in self._open)

    def _is_beaten(self, number: int) -> bool:
        return any(beats(v, self._bounds[number]) for v in self._values.values())

    def run(
        self,
        evaluate: Callable[[Sequence[int]], Iterable[tuple[int, tuple[float, ...] | None, T]]],
        at_a_time: int,
    ) -> Iterator[int]:
        """Evaluate until no point is left that may be on the front; yields the number of points
        tried so far."""
        while True:
            batch: list[int] = []
            while self._open and len(batch) < at_a_time:
                number = self._open.pop(0)
                if not self._is_beaten(number):
                    batch.append(number)
            if not batch:
                return
            for number, values, what in evaluate(batch):
                self.tried += 1
                if values is not None:
                    self._values[number], self._what[number] = values, what
                yield self.tried
