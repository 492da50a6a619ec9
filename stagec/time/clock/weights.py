"""The weights of longest paths (`paths`), for all pieces of a structure at once: how long after
what it is given a piece comes to an end.

    product, gather beside, norm, product that waits for the gather

                        level 1              level 2
    from its start      product              product + max(norm, gather)       two moments in two
    from the stream     gather               gather + product                  levels

Moments of one level wait for none of each other, so each level is one step of numpy.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from stagec.program.nodes import Ints
from stagec.time.clock.segments import PieceWaits, Segment, Waits
from stagec.time.clock.shapes import Shape
from stagec.time.streams import MOST, Cost

#: The numbers of the nodes of a shape: nodes that do the same have the same one.
NodeNumbers = Callable[[Shape], Sequence[int]]


class NumberedCosts(Protocol):
    """What nodes cost, by their numbers."""

    def numbered(self, numbers: Sequence[int], /) -> Sequence[Cost]:
        """The costs of the nodes of these numbers."""
        ...


class _Level(NamedTuple):
    """Moments that wait for those of earlier levels: their numbers, the numbers of their waits, and
    where those of each moment begin."""

    moments: slice
    waits: slice
    begins: Ints


class _Parts(NamedTuple):
    """Parts of pieces, which follow moments: the numbers of these, and the places among all nodes
    between which the parts are."""

    moment: Ints
    first: Ints
    last: Ints

    def lengths(self, sums: Ints) -> Ints:
        """What the parts take; `sums` are those of the costs up to each place."""
        return sums[self.last] - sums[self.first]


class PathWeights(NamedTuple):
    """The weights of a structure, the first of which is nothing: each is a part of a piece behind a
    moment of it, or a call, which takes what it takes the slowest of its members. There are so many
    `moments`; `used` are the numbers of nodes of each class, and `nodes` tells which of them stands
    at each place."""

    used: Sequence[tuple[int, ...]]
    nodes: Ints
    moments: int
    levels: Sequence[_Level]
    waits: _Parts
    weights: _Parts
    calls: Sequence[tuple[int, Sequence[int]]]

    def at(self, costs: Sequence[NumberedCosts]) -> Ints:
        """The weights for these costs of the classes, in picoseconds."""
        known: dict[tuple[NumberedCosts, tuple[int, ...]], Sequence[Cost]] = {}
        each: list[Cost] = []
        for key in zip(costs, self.used, strict=True):
            if key not in known:
                known[key] = key[0].numbered(key[1])
            each += known[key]
        most = max((c.time + c.launch for c in each), default=0) * len(self.nodes)
        # whole numbers of Python are of any size, but slower
        kind: type[np.int64] = np.int64 if most <= MOST else cast(Any, object)
        times: Ints = np.array([(c.time, c.launch) for c in each], dtype=kind).reshape(-1, 2)
        sums: Ints = np.concatenate([[0], np.cumsum(times.sum(axis=1)[self.nodes])])
        moments: Ints = np.zeros(self.moments, dtype=kind)
        taken = self.waits.lengths(sums)
        for found, waits, begins in self.levels:
            ends: Ints = moments[self.waits.moment[waits]] + taken[waits]
            moments[found] = np.maximum.reduceat(ends, begins)
        weights: Ints = moments[self.weights.moment] + self.weights.lengths(sums)
        for number, places in self.calls:
            weights[number] = times[self.nodes[[*places]], 0].max()
        return weights


class WeightMaker:
    """Gives numbers to weights, and finds how they are computed."""

    def __init__(self, classes: int, numbers: NodeNumbers) -> None:
        self._numbers = numbers
        self._used: list[dict[int, int]] = [{} for _ in range(classes)]
        self._first: dict[tuple[int, Shape], int] = {}
        self._owner, self._local = array("i"), array("i")
        self._pieces: dict[tuple[int, PieceWaits, int], dict[Segment, int]] = {}
        self._calls: dict[tuple[int, ...], int] = {}
        self._count = 1

    def piece(self, owner: int, template: PieceWaits, given: int, end: Segment) -> int:
        """The number of the weight from what a piece of a class is given to an end of it."""
        known = self._pieces.setdefault((owner, template, given), {})
        found = known.get(end)
        if found is None:
            found = known[end] = self._new()
        return found

    def call(self, members: Iterable[tuple[int, Shape]]) -> int:
        """The number of what a call of these members takes."""
        key = tuple(self._place(*member) for member in members)
        if key not in self._calls:
            self._calls[key] = self._new()
        return self._calls[key]

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _place(self, owner: int, shape: Shape) -> int:
        """The place of the first node of a shape of a class."""
        found = self._first.get((owner, shape))
        if found is None:
            found = self._first[owner, shape] = len(self._local)
            used, numbers = self._used[owner], self._numbers(shape)
            self._local.extend([used.setdefault(number, len(used)) for number in numbers])
            self._owner.extend([owner] * len(numbers))
        return found

    def made(self) -> PathWeights:
        """All weights."""
        moments = _Moments()
        first, last, of = ([0] * self._count for _ in range(3))
        for (owner, template, given), ends in self._pieces.items():
            place = self._place(owner, template.shape)
            key = moments.add(place, given, template.between(given, ends))
            for segment, weight in ends.items():
                first[weight], last[weight] = place + segment.first, place + segment.last
                of[weight] = moments.number(key, segment.moment)
        used = [tuple(numbers) for numbers in self._used]
        begins = np.cumsum([0, *map(len, used)])
        nodes = begins[np.asarray(self._owner, dtype=np.int64)] + np.asarray(self._local)
        levels, waits, order = moments.made()
        weights = _Parts(order[of], np.array(first), np.array(last))
        calls = [(number, places) for places, number in self._calls.items()]
        return PathWeights(used, nodes, len(order), levels, waits, weights, calls)


class _Moments:
    """The moments of all pieces, and their levels. The number of a moment is that in which it is
    added; it is found by its level."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._level: list[int] = []
        self._waits: list[Sequence[tuple[int, int, int]]] = []

    def add(self, place: int, given: int, between: Sequence[Waits]) -> int:
        """Add those between what a piece is given and its ends; a number for `number`."""
        key = len(self._level)
        self._add((key, given), ())
        for number, waits in between:
            parts = [(self._known[key, m], place + first, place + last) for m, first, last in waits]
            self._add((key, number), parts)
        return key

    def number(self, key: int, moment: int) -> int:
        """The number of a moment that was added."""
        return self._known[key, moment]

    def _add(self, name: tuple[int, int], waits: Sequence[tuple[int, int, int]]) -> None:
        self._known[name] = len(self._level)
        self._level.append(1 + max((self._level[number] for number, *_ in waits), default=-1))
        self._waits.append(waits)

    def made(self) -> tuple[list[_Level], _Parts, Ints]:
        """The levels, the waits of all moments, and where each moment is found."""
        level = np.array(self._level, dtype=np.int64)
        by_level = np.argsort(level, kind="stable")
        order = np.empty_like(by_level)
        order[by_level] = np.arange(len(order))
        numbers: list[int] = by_level.tolist()
        rows = [part for number in numbers for part in self._waits[number]]
        parts = np.array(rows, dtype=np.int64).reshape(-1, 3)
        begins = np.cumsum([0, *(len(self._waits[number]) for number in numbers)])
        bounds = np.searchsorted(level[by_level], np.arange(1, int(level.max(initial=0)) + 2))
        levels = [
            _Level(slice(a, b), slice(begins[a], begins[b]), begins[a:b] - begins[a])
            for a, b in itertools.pairwise(bounds.tolist())
        ]
        return levels, _Parts(order[parts[:, 0]], parts[:, 1], parts[:, 2]), order
