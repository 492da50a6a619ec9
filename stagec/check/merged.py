"""The graph of a whole job: the programs of its ranks, connected by their communication.

A send precedes its receive; the nodes of a collective on all its members are one vertex. A cycle is
a deadlock.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from stagec.check.program import Analysis

Vertex = tuple[int, int]
"""A unit (a rank, or a whole class of ranks) and the index of a node of its program."""

Edge = tuple[Vertex, Vertex]
"""The first vertex must finish for the second to start."""


@dataclass(frozen=True, slots=True)
class Communication:
    """The communication between units: edges from sends to their receives, and pairs of nodes of
    one collective."""

    messages: Iterable[Edge]
    meetings: Iterable[tuple[Vertex, Vertex]]


class MergedGraph:
    """The merged graph of some units; with `keep`, only of these nodes of each unit."""

    def __init__(
        self,
        units: Mapping[int, Analysis],
        communication: Communication,
        keep: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self._leader: dict[Vertex, Vertex] = {}
        for one, other in communication.meetings:
            self._leader[self.merged(one)] = self.merged(other)
        edges = (*_dependencies(units, keep), *communication.messages)
        self._edges = [edge for edge in edges if _kept(edge, keep)]

    def merged(self, vertex: Vertex) -> Vertex:
        """The vertex that represents a collective, or the vertex itself."""
        leader = self._leader
        root = vertex
        while root in leader and leader[root] != root:
            root = leader[root]
        while vertex != root:
            leader[vertex], vertex = root, leader[vertex]
        return root

    def core(self) -> list[Edge]:
        """The edges on cycles or on paths between cycles; empty for a graph without cycles."""
        pairs = [(self.merged(before), self.merged(after)) for before, after in self._edges]
        behind = unpeeled(pairs)
        inside = unpeeled((a, b) for b, a in pairs if a in behind and b in behind)
        edges = zip(self._edges, pairs, strict=True)
        return [edge for edge, (a, b) in edges if a in inside and b in inside]

    def cycle(self, core: Iterable[Edge]) -> list[Edge]:
        """The edges of one cycle of a nonempty `core`, in execution order."""
        into = {self.merged(edge[1]): edge for edge in core}
        vertex = min(into)
        walked: dict[Vertex, Edge] = {}
        while vertex not in walked:
            walked[vertex] = into[vertex]
            vertex = self.merged(into[vertex][0])
        first = [*walked].index(vertex)
        return [*walked.values()][first:][::-1]


def unpeeled(pairs: Iterable[tuple[Vertex, Vertex]]) -> set[Vertex]:
    """The vertices that remain after vertices without incoming edges are removed repeatedly."""
    users: dict[Vertex, list[Vertex]] = defaultdict(list)
    waiting: Counter[Vertex] = Counter()
    for before, after in pairs:
        users[before].append(after)
        waiting[after] += 1
    ready = [vertex for vertex in users if vertex not in waiting]
    while ready:
        for user in users.get(ready.pop(), ()):
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return {vertex for vertex, count in waiting.items() if count}


def _dependencies(
    units: Mapping[int, Analysis], keep: Mapping[int, Collection[int]] | None
) -> Iterator[Edge]:
    for unit, analysis in units.items():
        for index in range(len(analysis.deps)) if keep is None else keep.get(unit, ()):
            for source in analysis.deps[index]:
                yield (unit, source), (unit, index)


def _kept(edge: Edge, keep: Mapping[int, Collection[int]] | None) -> bool:
    return keep is None or all(index in keep.get(unit, ()) for unit, index in edge)
