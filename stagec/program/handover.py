"""Messages from the ranks of one pod to those of another: a value of one placement becomes the same
value of another placement, each byte sent once to each rank that holds it.

A pod is a mesh with a strategy of its own; the ranks of a job are those of its pods, one pod after
the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.types import CACHED
from stagec.program.groups import coordinate
from stagec.support.diagnostics import error

Ints = npt.NDArray[np.int64]
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
        found = np.zeros_like(ranks)
        for axis in axes:
            found = found * self.mesh[axis] + coordinate(self.mesh, axis, ranks)
        return found

    def rank_of(self, places: Ints) -> Ints:
        """The ranks at these places."""
        sizes = (*self.parts, self.replicas)
        own = np.ravel_multi_index(tuple(self.places().T), sizes)
        by_place = np.empty(self.ranks, dtype=np.int64)
        by_place[own] = np.arange(self.ranks)
        found: Ints = by_place[np.ravel_multi_index(tuple(places.T), sizes)]
        return found


@dataclass(frozen=True, slots=True)
class Handover:
    """Who sends to whom: `to[j]` are the receivers of the j-th messages of all senders, `of[i]` the
    senders of the i-th messages of all receivers. A message carries 1 / `pieces` of what a sender
    holds."""

    to: Sequence[Ints]
    of: Sequence[Ints]
    pieces: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses: `to` and `of` are the numbers of its first messages among those of all
    values, at the source and at the target. Values with the same placements share these."""

    way: Handover
    to: int
    of: int


def crossings(source: Module, target: Module) -> dict[str, Crossing]:
    """The caches of two placed modules by name, in order: how each crosses. Raises
    `DiagnosticError` for caches that are not the same in both and for open axes, and
    `NoHandoverError`."""
    mine, theirs = _caches(source), _caches(target)
    if mine.keys() != theirs.keys():
        lost = min(mine.keys() ^ theirs.keys())
        raise error(
            f"%{lost} is a cache of one pod and not of the other",
            source.main.loc,
            remedy="serve the same model in both pods, with the same element types",
        )
    for name, value in mine.items():
        if value.tensor.rank != theirs[name].tensor.rank:
            raise error(
                f"%{name} is {value.type} in one pod and {theirs[name].type} in the other",
                value.loc,
                remedy="serve the same model in both pods",
            )
    known: dict[tuple[Layouts, Layouts], Crossing] = {}
    found: dict[str, Crossing] = {}
    to = of = 0
    for name in sorted(mine):
        ends = _layouts(source, mine[name]), _layouts(target, theirs[name])
        if ends not in known:
            known[ends] = Crossing(handover(*ends), to, of)
            to, of = to + len(known[ends].way.to), of + len(known[ends].way.of)
        found[name] = known[ends]
    return found


def peers(found: Iterable[Crossing], *, sends: bool) -> list[Ints]:
    """The ranks of the other pod that the messages of each number go to, or come from."""
    every = {(c.to if sends else c.of): c.way.to if sends else c.way.of for c in found}
    return [ranks for _, ways in sorted(every.items()) for ranks in ways]


def _caches(module: Module) -> dict[str, Value]:
    return {a.name: a for a in module.main.body.args if a.tensor.role in CACHED}


def _layouts(module: Module, value: Value) -> Layouts:
    mesh = module.mesh
    sizes = mesh.sizes if mesh else {}
    known = [(axis, n) for axis, n in sizes.items() if n is not None]
    if open_ := sorted(sizes.keys() - dict(known).keys()):
        raise error(
            f"the size of axis {open_[0]} is open: who sends to whom depends on it",
            module.root.loc,
            remedy=module.how_to_set(open_),
        )
    return Layouts(tuple(known), tuple(d.axes for d in value.tensor.dims))


def handover(source: Layouts, target: Layouts) -> Handover:
    """The messages that bring a value from one placement to the other.

    A dimension in s parts meets one in t parts in max(s, t) parts. Where more ranks hold a part at
    the source than at the target, each of them sends a piece of it; where fewer do, each of them
    sends it to several. Llama-3 70B with 8 key/value heads, from tp = 4 to tp = 8: each rank of the
    source sends one of its two heads to each of two ranks.

    Raises `NoHandoverError` where of two numbers of parts, or of replicas, neither divides the
    other.
    """
    cuts = [_ratio(s, t) for s, t in zip(source.parts, target.parts, strict=True)]
    split, shared = _ratio(source.replicas, target.replicas)
    # the last column of a place is the replica; there the source's pieces lie side by side
    finer = [t for _, t in cuts]
    coarser = [s for s, _ in cuts]
    to = _meet(source, target, [*zip(finer, coarser, strict=True), (shared, split)])
    of = _meet(target, source, [*zip(coarser, finer, strict=True), (split, shared)])
    return Handover(to, of, prod(finer) * split)


def _ratio(source: int, target: int) -> tuple[int, int]:
    """How many parts of the source lie in one of the target, and the reverse; one of them is 1."""
    if source % target == 0:
        return source // target, 1
    if target % source == 0:
        return 1, target // source
    raise NoHandoverError(f"{source} parts, and {target}")


def _meet(one: Layouts, other: Layouts, ratios: Sequence[tuple[int, int]]) -> list[Ints]:
    """The ranks of `other` that each rank of `one` meets: along each dimension `more` of its parts
    lie in one part here, or one of them holds `fewer` parts of here."""
    places = one.places()
    found: list[Ints] = []
    for offsets in product(*(range(more) for more, _ in ratios)):
        columns = [
            places[:, d] * more // fewer + offset
            for d, ((more, fewer), offset) in enumerate(zip(ratios, offsets, strict=True))
        ]
        found.append(other.rank_of(np.stack(columns, axis=1)))
    return found
