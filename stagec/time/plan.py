"""What a class replays: the runs of its program, cut where they wait for other classes, each with
the places of its inputs."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node
from stagec.program.runs import Run, RunKind
from stagec.time.pieces import Shape, make_shape
from stagec.time.streams import COMPUTE, streams_of

#: A piece of the plan by its number, and a place in it.
At = tuple[int, int]
#: Axes of collectives.
Groups = frozenset[GroupAxes]


class Planned(NamedTuple):
    """A piece of a class: its shape, and where its inputs come from."""

    shape: Shape
    inputs: tuple[At, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A part of a kind of run, and what its nodes wait for outside of it.

    `places` are where the table of an instance has the inputs. `always` tells those that
    collectives and messages wait for: computations follow the computations before them anyway.
    """

    first: int
    last: int
    joins: bool
    nodes: Sequence[Node]
    inner: Sequence[Sequence[int]]
    outer: Sequence[Sequence[int]]
    places: Ints
    always: npt.NDArray[np.bool_]
    beside_compute: Ints


class Planner:
    """Plans classes; what they have in common is prepared once. It does not ask what nodes cost."""

    def __init__(self, *, overlap: bool, one_stream: bool = False) -> None:
        self._overlap, self._one_stream = overlap, one_stream
        self._cuts: dict[tuple[Groups, RunKind], list[_Cut]] = {}
        self._shapes: dict[tuple[_Cut, tuple[int, ...]], Shape] = {}

    def plan(self, runs: Sequence[Run], alone: Groups) -> list[Planned]:
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
        nodes = kind.nodes
        joining = [i for i, node in enumerate(nodes) if _joins(node, alone)]
        bounds = sorted({0, len(nodes), *joining, *(i + 1 for i in joining)})
        for first, last in pairwise(bounds):
            yield self._part(kind, first, last, first in joining)

    def _part(self, kind: RunKind, first: int, last: int, joins: bool) -> _Cut:
        nodes = kind.nodes[first:last]
        inside = {node: i for i, node in enumerate(nodes)}
        numbers: dict[int, int] = {}
        always: list[bool] = []
        inner: list[list[int]] = []
        outer: list[list[int]] = []
        for node in nodes:
            waits = (*node.deps, *node.after)
            inner.append([inside[d] for d in waits if d in inside])
            mine: list[int] = []
            computes = COMPUTE in self._streams(node, joins)
            for dep in waits:
                if dep in inside:
                    continue
                place = kind.place(dep)
                number = numbers.setdefault(place, len(numbers))
                if number == len(always):
                    always.append(False)
                always[number] = always[number] or not computes
                mine.append(number)
            outer.append(mine)
        beside = [i for i, n in enumerate(nodes) if COMPUTE not in self._streams(n, joins)]
        return _Cut(
            first,
            last,
            joins,
            nodes,
            inner,
            outer,
            np.array([*numbers], dtype=np.int64),
            np.array(always, dtype=bool),
            np.array(beside, dtype=np.int64),
        )

    def _streams(self, node: Node, joins: bool) -> tuple[Hashable, ...]:
        """The streams of a node. What joins classes stays beside computations."""
        overlap = self._overlap or joins
        return streams_of(node, overlap=overlap, one_stream=self._one_stream)

    def shape(self, cut: _Cut, used: tuple[int, ...]) -> Shape:
        """The shape of a part that waits for these of its inputs."""
        found = self._shapes.get((cut, used))
        if found is None:
            number = {place: i for i, place in enumerate(used)}
            inputs = [[number[i] for i in row if i in number] for row in cut.outer]
            streams = [self._streams(node, cut.joins) for node in cut.nodes]
            found = make_shape(cut.nodes, streams, cut.inner, inputs, joins=cut.joins)
            self._shapes[cut, used] = found
        return found


def _joins(node: Node, alone: Groups) -> bool:
    """Whether a node waits for other classes: a message that comes, or a collective of several."""
    if node.is_message:
        return node.kind == "recv"
    return node.is_collective and node.group not in alone


class _ClassPlan:
    """Finds where the inputs of a class's runs come from."""

    def __init__(self, planner: Planner, runs: Sequence[Run], alone: Groups) -> None:
        self._planner, self._runs, self._alone = planner, runs, alone
        most = max((run.start + run.kind.last - run.kind.first for run in runs), default=0)
        #: By handle, whether a node is beside the computations.
        self._beside = np.zeros(most, dtype=bool)
        self._starts: list[int] = []
        self._number: dict[int, int] = {}

    def pieces(self) -> Iterator[Planned]:
        """The pieces, in the order of issue."""
        for run in self._runs:
            for cut in self._planner.cuts(run.kind, self._alone):
                yield self._planned(run, cut)

    def _planned(self, run: Run, cut: _Cut) -> Planned:
        start = run.start + cut.first
        used: tuple[int, ...] = ()
        inputs: tuple[At, ...] = ()
        if len(cut.places):
            table = None if run.instance is None else run.instance.table
            handles = cut.places if table is None else table[cut.places]
            wanted = np.flatnonzero(cut.always | self._beside[handles])
            if len(wanted):
                used = tuple(wanted.tolist())
                inputs = tuple(self._at(handle) for handle in handles[wanted].tolist())
        if len(cut.beside_compute):
            self._beside[start + cut.beside_compute] = True
        self._number[start] = len(self._number)
        if self._starts and start < self._starts[-1]:  # a bucket, which has its handle from earlier
            insort(self._starts, start)
        else:
            self._starts.append(start)
        return Planned(self._planner.shape(cut, used), inputs)

    def _at(self, handle: int) -> At:
        start = self._starts[bisect_right(self._starts, handle) - 1]
        return self._number[start], handle - start
