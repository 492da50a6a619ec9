"""What a class replays: the runs of its program, cut where they wait for other classes, each with
the places of its inputs."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stagec.program.nodes import Ints, Node
from stagec.program.runs import Run, RunKind
from stagec.time.pieces import Piece, make_piece
from stagec.time.streams import COMPUTE, Cost, streams_of

#: A piece of the plan by its number, and a place in it.
At = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Planned:
    """A piece with its inputs. One that `joins` classes is one node: the end of a message, or a
    collective of several classes."""

    piece: Piece
    inputs: tuple[At, ...]
    joins: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """A part of a kind of run, and what its nodes wait for outside of it.

    `places` are where the table of an instance has the inputs. `always` tells those that collectives
    and messages wait for; computations need no word of computations before them.
    """

    first: int
    last: int
    joins: bool
    nodes: Sequence[Node]
    inner: Sequence[Sequence[int]]
    outer: Sequence[Sequence[int]]
    places: Ints
    always: np.ndarray
    beside_compute: Ints


class Planner:
    """Plans classes; what they have in common is prepared once.

    `joins` tells whether a node of a class waits for other classes, `costs` what each node costs.
    Classes with the same `key` share pieces.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self._cuts: dict[tuple[Hashable, RunKind], list[_Cut]] = {}
        self._pieces: dict[Hashable, Piece] = {}

    def plan(
        self,
        runs: Sequence[Run],
        costs: Callable[[Node], Cost],
        joins: Callable[[Node], bool],
        key: Hashable,
    ) -> list[Planned]:
        """The pieces of a class in the order of issue."""
        return list(_ClassPlan(self, runs, costs, joins, key).pieces())

    def cuts(self, kind: RunKind, joins: Callable[[Node], bool], key: Hashable) -> list[_Cut]:
        """The parts of a kind of run."""
        if (key, kind) not in self._cuts:
            self._cuts[key, kind] = list(self._cut(kind, joins))
        return self._cuts[key, kind]

    def _cut(self, kind: RunKind, joins: Callable[[Node], bool]) -> Iterator[_Cut]:
        nodes = kind.nodes
        alone = [i for i, node in enumerate(nodes) if joins(node)]
        bounds = sorted({0, len(nodes), *alone, *(i + 1 for i in alone)})
        for first, last in zip(bounds, bounds[1:]):
            yield self._part(kind, first, last, first in alone)

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
                place = dep.id if kind.template is None else kind.template.place(dep)
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
        return streams_of(node, overlap=self._overlap or joins)

    def piece(
        self,
        kind: RunKind,
        cut: _Cut,
        used: tuple[int, ...],
        costs: Callable[[Node], Cost],
        key: Hashable,
    ) -> Piece:
        """A part of a kind of run that waits for these of its inputs."""
        known = key, kind, cut.first, used
        found = self._pieces.get(known)
        if found is None:
            number = {place: i for i, place in enumerate(used)}
            inputs = [[number[i] for i in row if i in number] for row in cut.outer]
            beside = [
                node.is_collective
                and not cut.joins
                and COMPUTE not in self._streams(node, cut.joins)
                for node in cut.nodes
            ]
            found = self._pieces[known] = make_piece(
                cut.nodes,
                [costs(node) for node in cut.nodes],
                cut.inner,
                inputs,
                beside,
                overlap=self._overlap or cut.joins,
            )
        return found


class _ClassPlan:
    """Finds where the inputs of a class's runs come from."""

    def __init__(
        self,
        planner: Planner,
        runs: Sequence[Run],
        costs: Callable[[Node], Cost],
        joins: Callable[[Node], bool],
        key: Hashable,
    ) -> None:
        self._planner, self._runs, self._costs = planner, runs, costs
        self._joins, self._key = joins, key
        most = max((run.start + run.kind.last - run.kind.first for run in runs), default=0)
        #: By handle, whether a node is beside the computations.
        self._beside = np.zeros(most, dtype=bool)
        self._starts: list[int] = []
        self._number: dict[int, int] = {}

    def pieces(self) -> Iterator[Planned]:
        """The pieces, in the order of issue."""
        for run in self._runs:
            for cut in self._planner.cuts(run.kind, self._joins, self._key):
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
        piece = self._planner.piece(run.kind, cut, used, self._costs, self._key)
        return Planned(piece, inputs, cut.joins)

    def _at(self, handle: int) -> At:
        start = self._starts[bisect_right(self._starts, handle) - 1]
        return self._number[start], handle - start
