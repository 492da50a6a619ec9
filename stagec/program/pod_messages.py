"""Messages from the ranks of one pod to those of another: a value of one placement becomes the same
value of another placement, each byte sent once to each rank that holds it.

Here ranks are those of a pod, or of one of its pipeline stages: `stagec.program.crossings` has the
stages and microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from stagec.program.groups import Ints, coordinate

Mesh = Mapping[str, int]


class NoHandoverError(ValueError):
    """The parts of one placement do not fall together with those of the other."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the ranks of a pod hold a value: the axes of the mesh with their sizes, and for each
    dimension those that split it, major first."""

    axes: tuple[tuple[str, int], ...]
    splits: tuple[tuple[str, ...], ...]

    @property
    def mesh(self) -> Mesh:
        """The axes of the pod with their sizes."""
        return dict(self.axes)

    @property
    def ranks(self) -> int:
        """The ranks of the pod."""
        return prod(self.mesh.values())

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of each dimension."""
        return tuple(prod(self.mesh[a] for a in axes) for axes in self.splits)

    @property
    def replicas(self) -> int:
        """How many ranks hold each part."""
        return self.ranks // prod(self.parts)

    def places(self) -> Ints:
        """For each rank the number of its part along each dimension, and of its replica."""
        ranks = np.arange(self.ranks, dtype=np.int64)
        used = {a for axes in self.splits for a in axes}
        rest = tuple(a for a in self.mesh if a not in used)
        columns = [self._number(axes, ranks) for axes in (*self.splits, rest)]
        return np.stack(columns, axis=1)

    def _number(self, axes: Sequence[str], ranks: Ints) -> Ints:
        numbers = np.zeros_like(ranks)
        for axis in axes:
            numbers = numbers * self.mesh[axis] + coordinate(self.mesh, axis, ranks)
        return numbers

    def rank_of(self, places: Ints) -> Ints:
        """The ranks at these places."""
        sizes = (*self.parts, self.replicas)
        own = np.ravel_multi_index(tuple(self.places().T), sizes)
        by_place = np.empty(self.ranks, dtype=np.int64)
        by_place[own] = np.arange(self.ranks)
        ranks: Ints = by_place[np.ravel_multi_index(tuple(places.T), sizes)]
        return ranks


@dataclass(frozen=True, slots=True)
class Handover:
    """Who sends to whom: `to[j]` are the receivers of the j-th messages of all senders, `of[i]` the
    senders of the i-th messages of all receivers. A message carries 1 / `pieces` of what a sender
    holds: each dimension is cut into `cuts` parts, and replicas share what is left."""

    to: Sequence[Ints]
    of: Sequence[Ints]
    pieces: int
    cuts: tuple[int, ...]


def handover(source: Layouts, target: Layouts) -> Handover:
    """The messages that bring a value from one placement to the other.

    A dimension in s parts meets one in t parts in max(s, t) parts. Where more ranks hold a part at
    the source than at the target, each of them sends a piece of it; where fewer do, each of them
    sends it to several. Llama-3 70B with 8 key/value heads, from tp = 4 to tp = 8: each rank of the
    source sends one of its two heads to each of two ranks.

    Raises `NoHandoverError` where of two numbers of parts, or of replicas, neither divides the
    other.
    """
    cuts = [ratio(s, t) for s, t in zip(source.parts, target.parts, strict=True)]
    split, shared = ratio(source.replicas, target.replicas)
    # the last column of a place is the replica; there the source's pieces lie side by side
    finer = [t for _, t in cuts]
    coarser = [s for s, _ in cuts]
    to = _meet(source, target, [*zip(finer, coarser, strict=True), (shared, split)])
    of = _meet(target, source, [*zip(coarser, finer, strict=True), (split, shared)])
    return Handover(to, of, prod(finer) * split, tuple(finer))


def ratio(source: int, target: int, what: str = "parts") -> tuple[int, int]:
    """How many parts of the source lie in one of the target, and the reverse; one of them is 1.
    Raises `NoHandoverError` if neither number divides the other."""
    if source % target == 0:
        return source // target, 1
    if target % source == 0:
        return 1, target // source
    raise NoHandoverError(f"{source} {what}, and {target}")


def _meet(one: Layouts, other: Layouts, ratios: Sequence[tuple[int, int]]) -> list[Ints]:
    """The ranks of `other` that each rank of `one` meets: along each dimension `more` of its parts
    lie in one part here, or one of them holds `fewer` parts of here."""
    places = one.places()
    overlaps: list[Ints] = []
    for offsets in product(*(range(more) for more, _ in ratios)):
        columns = [
            places[:, d] * more // fewer + offset
            for d, ((more, fewer), offset) in enumerate(zip(ratios, offsets, strict=True))
        ]
        overlaps.append(other.rank_of(np.stack(columns, axis=1)))
    return overlaps
