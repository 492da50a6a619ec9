"""Messages from the ranks of one pod to those of another that change the placement of a value. Each
byte is sent once to each rank that needs it.

Ranks are those of a pod, or of one of its pipeline stages; `stagec.program.crossings` adds stages
and microbatches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from stagec.program.groups import Ints, coordinate

Mesh = Mapping[str, int]


class NoHandoverError(ValueError):
    """The numbers of parts of two placements do not divide each other."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """The placement of a value on the ranks of a pod: the axes of the mesh with their sizes, and
    for each dimension the axes that split it, major first."""

    axes: tuple[tuple[str, int], ...]
    splits: tuple[tuple[str, ...], ...]

    @property
    def mesh(self) -> Mesh:
        """The axes of the pod with their sizes."""
        return dict(self.axes)

    @property
    def ranks(self) -> int:
        """The number of ranks of the pod."""
        return prod(self.mesh.values())

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        return tuple(prod(self.mesh[a] for a in axes) for axes in self.splits)

    @property
    def replicas(self) -> int:
        """The number of ranks that have each part."""
        return self.ranks // prod(self.parts)

    def places(self) -> Ints:
        """A row for each rank: the number of its part along each dimension, and of its replica."""
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
        """The ranks at the given rows of `places`."""
        sizes = (*self.parts, self.replicas)
        own = np.ravel_multi_index(tuple(self.places().T), sizes)
        by_place = np.empty(self.ranks, dtype=np.int64)
        by_place[own] = np.arange(self.ranks)
        ranks: Ints = by_place[np.ravel_multi_index(tuple(places.T), sizes)]
        return ranks


@dataclass(frozen=True, slots=True)
class Handover:
    """Senders and receivers: `to[j]` are the receivers of the j-th messages of all senders, `of[i]`
    the senders of the i-th messages of all receivers. A message is 1 / `pieces` of a sender's part:
    each dimension is divided by `cuts`, and the rest among replicas."""

    to: Sequence[Ints]
    of: Sequence[Ints]
    pieces: int
    cuts: tuple[int, ...]


def handover(source: Layouts, target: Layouts) -> Handover:
    """The messages that move a value from one placement to the other.

    A dimension with s parts at the source and t at the target is sent in max(s, t) parts. If the
    source has more replicas of a part than the target, each of them sends a piece of it; if it has
    fewer, each of them sends it to several ranks. Example: Llama-3 70B with 8 key/value heads, from
    tp = 4 to tp = 8: each rank of the source sends one of its two heads to each of two ranks.

    Raises `NoHandoverError` if of two numbers of parts, or of replicas, neither divides the other.
    """
    cuts = [ratio(s, t) for s, t in zip(source.parts, target.parts, strict=True)]
    split, shared = ratio(source.replicas, target.replicas)
    # the last column of a place is the replica: a replica of the source has consecutive pieces
    finer = [t for _, t in cuts]
    coarser = [s for s, _ in cuts]
    to = _meet(source, target, [*zip(finer, coarser, strict=True), (shared, split)])
    of = _meet(target, source, [*zip(coarser, finer, strict=True), (split, shared)])
    return Handover(to, of, prod(finer) * split, tuple(finer))


def ratio(source: int, target: int, what: str = "parts") -> tuple[int, int]:
    """The number of parts of the source per part of the target, and the reverse; one of the two is
    1. Raises `NoHandoverError` if neither number divides the other."""
    if source % target == 0:
        return source // target, 1
    if target % source == 0:
        return 1, target // source
    raise NoHandoverError(f"{source} {what}, and {target}")


def _meet(one: Layouts, other: Layouts, ratios: Sequence[tuple[int, int]]) -> list[Ints]:
    """The ranks of `other` whose parts overlap those of each rank of `one`. `ratios` are pairs
    (`more`, `fewer`) for each dimension: a part of `one` contains `more` parts of `other`, or a
    part of `other` contains `fewer` parts of `one`."""
    places = one.places()
    overlaps: list[Ints] = []
    for offsets in product(*(range(more) for more, _ in ratios)):
        columns = [
            places[:, d] * more // fewer + offset
            for d, ((more, fewer), offset) in enumerate(zip(ratios, offsets, strict=True))
        ]
        overlaps.append(other.rank_of(np.stack(columns, axis=1)))
    return overlaps
