"""What a class replays: the runs of its program, cut where they wait for other classes, each with
the places of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node
from stagec.program.runs import Run, RunKind
from stagec.program.stamp import Inputs, Instance
from stagec.time.clock.shapes import Shape, make_shape
from stagec.time.streams import COMPUTE, Stream, streams_of

#: A piece of the plan by its number, and a place in it.
At = tuple[int, int]
#: Axes of collectives.
Groups = frozenset[GroupAxes]
#: A node, what stands for it among the things that are waited for, and those that it waits for.
_Item = tuple[Node, int, Sequence[int]]


def never(_: Node) -> bool:
    """What no message does: waiting for its receiver."""
    return False


class PlannedPiece(NamedTuple):
    """A piece of a class: its shape, and where its inputs come from."""

    shape: Shape
    inputs: tuple[At, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A part of a kind of run, from its node `first` on, and what its nodes wait for outside of it.

    `places` are where the table of an instance has the inputs, or their handles. `always` tells
    those that collectives and messages wait for: computations follow the computations before them
    anyway. `marks` are what `_ClassPlan` keeps of its nodes.
    """

    first: int
    joins: bool
    nodes: Sequence[Node]
    inner: Sequence[Sequence[int]]
    outer: Sequence[Sequence[int]]
    places: Sequence[int]
    always: Sequence[bool]
    streams: Sequence[tuple[Stream, ...]]
    marks: Ints
    shapes: dict[tuple[int, ...], Shape] = field(default_factory=dict[tuple[int, ...], Shape])


class ClassPlanner:
    """Plans classes; what they have in common is prepared once. It does not ask what nodes cost,
    but which messages wait for their receivers."""

    def __init__(
        self, *, overlap: bool, one_stream: bool = False, waits: Callable[[Node], bool] = never
    ) -> None:
        self._overlap, self._one_stream, self._waits = overlap, one_stream, waits
        self._cuts: dict[tuple[Groups, RunKind], list[_Cut]] = {}

    def plan(self, runs: Sequence[Run], alone: Groups) -> list[PlannedPiece]:
        """The pieces of a class in the order of issue. Collectives over the axes `alone` join ranks
        of the class only."""
        return list(_ClassPlan(self, runs, alone).pieces())

    def cuts(self, kind: RunKind, alone: Groups) -> list[_Cut]:
        """The parts of a kind of run."""
        found = self._cuts.get((alone, kind))
        if found is None:
            found = self._cuts[alone, kind] = list(self._cut(kind, alone))
        return found

    def _cut(self, kind: RunKind, alone: Groups) -> Iterator[_Cut]:
        place = kind.place
        items = [(n, place(n), [place(d) for d in (*n.deps, *n.after)]) for n in kind.nodes]
        joining = [i for i, node in enumerate(kind.nodes) if self.joins_classes(node, alone)]
        bounds = sorted({0, len(items), *joining, *(i + 1 for i in joining)})
        for first, last in pairwise(bounds):
            yield self.part(items[first:last], first, joins=first in joining)

    def part(self, items: Sequence[_Item], first: int = 0, *, joins: bool = False) -> _Cut:
        """The part that consists of these."""
        inside = {place: i for i, (_, place, _) in enumerate(items)}
        numbers: dict[int, int] = {}
        always: list[bool] = []
        inner: list[list[int]] = []
        outer: list[list[int]] = []
        streams = [self._streams(node, joins) for node, _, _ in items]
        computes = [COMPUTE in mine for mine in streams]
        for (_, _, waits), computing in zip(items, computes, strict=True):
            inner.append([inside[d] for d in waits if d in inside])
            mine: list[int] = []
            for place in waits:
                if place in inside:
                    continue
                number = numbers.setdefault(place, len(numbers))
                if number == len(always):
                    always.append(False)
                always[number] = always[number] or not computing
                mine.append(number)
            outer.append(mine)
        return _Cut(
            first,
            joins,
            [node for node, _, _ in items],
            inner,
            outer,
            [*numbers],
            always,
            streams,
            np.array([_mark(0, i, not c) for i, c in enumerate(computes)], dtype=np.int64),
        )

    def _streams(self, node: Node, joins: bool) -> tuple[Hashable, ...]:
        """The streams of a node. What joins classes stays beside computations."""
        overlap = self._overlap or joins
        return streams_of(node, overlap=overlap, one_stream=self._one_stream)

    def joins_classes(self, node: Node, alone: Groups) -> bool:
        """Whether a node waits for other classes: a message that comes, or that waits for its
        receiver, or a collective of several."""
        if node.is_message:
            return node.kind == "recv" or self._waits(node)
        return node.is_collective and node.group not in alone

    def shape(self, cut: _Cut, used: tuple[int, ...]) -> Shape:
        """The shape of a part that waits for these of its inputs."""
        found = cut.shapes.get(used)
        if found is None:
            number = {place: i for i, place in enumerate(used)}
            inputs = [[number[i] for i in row if i in number] for row in cut.outer]
            found = make_shape(cut.nodes, cut.streams, cut.inner, inputs, joins=cut.joins)
            cut.shapes[used] = found
        return found


class _ClassPlan:
    """Finds where the inputs of a class's runs come from.

    Runs that are the only ones of their kind become one piece with their neighbours: nothing is
    known of them from elsewhere. What waits for something that joins classes begins a piece, since
    others may wait for what was sent before it.
    """

    def __init__(self, planner: ClassPlanner, runs: Sequence[Run], alone: Groups) -> None:
        self._planner, self._runs, self._alone = planner, runs, alone
        most = max((run.start + run.kind.last - run.kind.first for run in runs), default=0)
        #: By handle: the piece and the place of a node and whether it is beside the computations,
        #: in one number; and whether it joins classes.
        self._marks = np.zeros(most, dtype=np.int64)
        self._joined = np.zeros(most, dtype=bool)
        self._count = 0
        #: The inputs of a part that may have to be waited for, by where its instance has them from.
        self._candidates: dict[tuple[Inputs, _Cut], Sequence[int]] = {}

    def pieces(self) -> Iterator[PlannedPiece]:
        """The pieces, in the order of issue."""
        times = Counter(run.kind for run in self._runs)
        once: list[_Item] = []
        for run in self._runs:
            kind = run.kind
            only = times[kind] == 1
            if only and not any(self._joins(node) for node in kind.nodes):
                items = list(_items(run))
                waits = [handle for _, _, handles in items for handle in handles]
                if once and self._joined[waits].any():
                    yield self._together(once)
                    once = []
                once += items
                continue
            if once:
                yield self._together(once)
                once = []
            for cut in self._planner.cuts(kind, self._alone):
                yield self._of_run(cut, run)
        if once:
            yield self._together(once)

    def _joins(self, node: Node) -> bool:
        return self._planner.joins_classes(node, self._alone)

    def _together(self, items: Sequence[_Item]) -> PlannedPiece:
        cut = self._planner.part(items)
        own = np.array([handle for _, handle, _ in items], dtype=np.int64)
        return self._planned(cut, own, enumerate(cut.places))

    def _of_run(self, cut: _Cut, run: Run) -> PlannedPiece:
        """A part of a run."""
        instance = run.instance
        inputs: Iterable[tuple[int, int]] = enumerate(cut.places)
        if instance is not None and cut.places:
            key = instance.inputs, cut
            candidates = self._candidates.get(key)
            if candidates is None:
                candidates = self._candidates[key] = self._found(cut, instance)
            inputs = ((i, instance.handle(cut.places[i])) for i in candidates)
        first = run.start + cut.first
        return self._planned(cut, slice(first, first + len(cut.nodes)), inputs)

    def _found(self, cut: _Cut, instance: Instance) -> Sequence[int]:
        """The inputs of a part that such an instance may have to wait for: all but computations of
        the instances that it takes from, since it follows these anyway."""
        return [
            i
            for i, place in enumerate(cut.places)
            if cut.always[i] or instance.passes(place) or self._marks[instance.handle(place)] & 1
        ]

    def _planned(
        self, cut: _Cut, own: slice | Ints, inputs: Iterable[tuple[int, int]]
    ) -> PlannedPiece:
        """The piece of a part with its `own` handles, of which these inputs, by number, are these
        handles."""
        always, marks = cut.always, self._marks.item
        wanted = [(i, mark) for i, handle in inputs if (mark := marks(handle)) & 1 or always[i]]
        self._marks[own] = cut.marks + _mark(self._count, 0, False)
        if cut.joins:
            self._joined[own] = True
        self._count += 1
        at = tuple([(mark >> _PIECE, mark >> 1 & _MOST_NODES) for _, mark in wanted])
        return PlannedPiece(self._planner.shape(cut, tuple([i for i, _ in wanted])), at)


#: Where the number of a piece begins in a mark: pieces have fewer nodes than programs.
_PIECE = 33
_MOST_NODES = (1 << _PIECE - 1) - 1


def _mark(piece: int, place: int, beside: bool) -> int:
    """A node: the number of its piece, its place there, whether it is beside the computations."""
    return piece << _PIECE | place << 1 | beside


def _items(run: Run) -> Iterator[_Item]:
    """The nodes of a run by their handles."""
    kind, instance = run.kind, run.instance
    for handle, node in enumerate(kind.nodes, run.start):
        places = [kind.place(d) for d in (*node.deps, *node.after)]
        yield node, handle, places if instance is None else [instance.handle(p) for p in places]
