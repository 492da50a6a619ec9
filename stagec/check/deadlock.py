"""Proves that the ranks of a job cannot wait for each other in a cycle.

Sends may wait until their receives are posted (rendezvous) or not (eager). If the messages of each
ordered pair of ranks are in order, the proof assumes rendezvous, which includes eager sends.

The merged graph is first built of rank classes. Mapping each rank to its class maps a cycle to a
cycle, so if classes have no cycle, ranks have none. Otherwise ranks of a class that communicate
with different classes are distinguished, such as pipeline stages that run the same program. If
there are still cycles, the graph is built of single ranks.

The graph of a whole job: the programs of its ranks, connected by their communication.

A send precedes its receive; the nodes of a collective on all its members are one vertex. A cycle is
a deadlock.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from stagec.check.agreement import CheckedJob, crossed_messages
from stagec.check.findings import CheckReport, Finding
from stagec.check.program import Analysis
from stagec.check.table import distinct
from stagec.program.nodes import Ints

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


EXPANDED_NODES = 20_000_000
"""The most nodes that are examined rank by rank; with more, the proof is abandoned."""

_CYCLE_STEPS = 12


def check_deadlock(
    job: CheckedJob, report: CheckReport, expanded_nodes: int = EXPANDED_NODES
) -> None:
    """Prove that the merged graph has no cycles, or report one. Sends wait for their receives if
    messages are in order and this has no cycles; otherwise they do not.

    A job is not checked if the dependencies of any rank are invalid.
    """
    if not all(each.analysis.valid for each in job.traces.classes):
        return
    if report.sends:
        report.eager_only = _why_eager_only(job, expanded_nodes)
        if report.eager_only is None:
            return
    cycle = _cycle(job, expanded_nodes, rendezvous=False)
    if cycle is None:
        return
    if not cycle:
        message = "expected a provable job, found cycles between rank classes"
        remedy = "make ranks with the same program communicate in the same order"
        report.error(job.directory, "unproven", message, remedy)
        return
    what = "expected an order in which all ranks can run, found a cycle"
    remedy = "issue the collectives and messages of these ranks in one consistent order"
    wrong = _described(job, cycle, "deadlock", what, remedy)
    report.error(wrong.path, wrong.code, wrong.message, wrong.remedy, node=wrong.node)


def _why_eager_only(job: CheckedJob, expanded_nodes: int) -> Finding | None:
    """The reason why the job may not finish if a send completes only when its receive is posted and
    messages between two ranks are matched in order; None if it is proved to finish."""
    crossed = next(crossed_messages(job), None)
    if crossed is not None:
        trace, node, message = crossed
        remedy = "issue the messages of two ranks in one order at both ends"
        return Finding(trace.path, node, "eager-only", message, remedy)
    cycle = _cycle(job, expanded_nodes, rendezvous=True)
    if cycle is None:
        return None
    remedy = "post receives earlier, or issue these messages in one consistent order"
    if not cycle:
        what = "cycles between rank classes are too large to look at rank by rank"
        return Finding(job.directory, None, "eager-only", what, remedy)
    what = "sends that wait for their receives deadlock"
    return _described(job, cycle, "eager-only", what, remedy)


def _cycle(job: CheckedJob, expanded_nodes: int, *, rendezvous: bool) -> list[Edge] | None:
    """A cycle of ranks; None if none exists, [] if that could not be proved."""
    table = job.traces
    units = table.class_of
    suspects = _suspects(job, units, rendezvous)
    if suspects:
        units = _refined(job, units, expanded_nodes)
        suspects = _suspects(job, units, rendezvous)
    if not suspects:
        return None
    places = np.flatnonzero(np.isin(units, [*suspects])).tolist()
    if sum(len(suspects[int(units[place])]) for place in places) > expanded_nodes:
        return []
    keep = {int(table.ranks[place]): suspects[int(units[place])] for place in places}
    ranks = {int(table.ranks[place]): _analysis(job, place) for place in places}
    graph = MergedGraph(ranks, _communication(job, table.ranks, rendezvous), keep)
    core = graph.core()
    return graph.cycle(core) if core else None


def _analysis(job: CheckedJob, place: int) -> Analysis:
    return job.traces.classes[int(job.traces.class_of[place])].analysis


def _refined(job: CheckedJob, units: Ints, most_nodes: int) -> Ints:
    """Refine classes until the peers of all ranks of a class are in the same classes, slot by slot,
    or until the classes have more than `most_nodes` nodes."""
    links, count = job.links, len(np.unique(units))
    while True:
        finer = np.empty_like(units)
        total = nodes = 0
        of_peers = np.where(links.there < 0, -1, units[links.there]) + 1
        for each in job.traces.classes:
            places = job.traces.places(each.ranks)
            first = links.starts[places]
            talk = (of_peers[first + slot] for slot in range(len(each.peers)))
            new, alike = distinct(units[places], *talk)
            finer[places] = alike + total
            total += len(new)
            nodes += len(new) * len(each.analysis.deps)
        if total == count or nodes > most_nodes:
            return units
        units, count = finer, total


def _suspects(job: CheckedJob, units: Ints, rendezvous: bool) -> Mapping[int, set[int]]:
    """For each class, the nodes on cycles of classes, or between them. `units` has the class of
    each rank."""
    graph = MergedGraph(_analyses(job, units), _communication(job, units, rendezvous))
    suspects: dict[int, set[int]] = defaultdict(set)
    for edge in graph.core():
        for class_id, index in edge:
            suspects[class_id].add(index)
    return suspects


def _analyses(job: CheckedJob, units: Ints) -> dict[int, Analysis]:
    first, _ = distinct(units)
    return {int(units[place]): _analysis(job, place) for place in first.tolist()}


def _communication(job: CheckedJob, units: Ints, rendezvous: bool) -> Communication:
    """The communication between the units that ranks belong to, without duplicates."""
    analyses = _analyses(job, units)
    return Communication(
        messages=(
            edge
            for src, dst, src_slot, dst_slot in _channels(job, units)
            for send, receive in _matched(analyses[src], src_slot, analyses[dst], dst_slot)
            for edge in _waits((src, send), (dst, receive), analyses[dst], rendezvous)
        ),
        meetings=(
            ((one, first.index), (other, second.index))
            for one, other, one_slot, other_slot in _neighbours(job, units)
            for first, second in zip(
                analyses[one].collectives.get(one_slot, ()),
                analyses[other].collectives.get(other_slot, ()),
                strict=False,
            )
        ),
    )


def _channels(job: CheckedJob, units: Ints) -> list[tuple[int, int, int, int]]:
    """For each channel, the units of the sender and the receiver, and the slot that each has for
    the other."""
    links = job.links
    met = links.back >= 0
    return _ways(units[links.here[met]], units[links.there[met]], links.slot[met], links.back[met])


def _neighbours(job: CheckedJob, units: Ints) -> list[tuple[int, int, int, int]]:
    """For successive ranks that use a group, their units and the slots of the group on them. These
    pairs connect all members."""
    uses = job.uses
    next_one = np.flatnonzero(uses.number[1:] == uses.number[:-1])
    one, other = units[uses.place[next_one]], units[uses.place[next_one + 1]]
    return _ways(one, other, uses.slot[next_one], uses.slot[next_one + 1])


def _ways(*columns: Ints) -> list[tuple[int, int, int, int]]:
    first, _ = distinct(*columns)
    one, other, one_slot, other_slot = (column[first].tolist() for column in columns)
    return [*zip(one, other, one_slot, other_slot, strict=True)]


def _matched(
    src: Analysis, src_slot: int, dst: Analysis, dst_slot: int
) -> Iterator[tuple[int, int]]:
    """Pairs of indices of sends and their receives, matched first in, first out for each tag and
    size."""
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    for receive in reversed(dst.receives.get(dst_slot, ())):
        waiting[receive.content].append(receive.index)
    for send in src.sends.get(src_slot, ()):
        if receives := waiting[send.content]:
            yield send.index, receives.pop()


def _waits(send: Vertex, receive: Vertex, there: Analysis, rendezvous: bool) -> Iterator[Edge]:
    """The edges of a message: the receive waits for the send. With `rendezvous`, the send waits for
    all dependencies of the receive on its rank, after which the receive is posted."""
    yield send, receive
    if rendezvous:
        unit, index = receive
        yield from (((unit, before), send) for before in there.deps[index])


def _described(job: CheckedJob, cycle: list[Edge], code: str, what: str, remedy: str) -> Finding:
    steps: list[str] = []
    for (before, after), (following, _) in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        meets = "" if after == following else f", one collective with {_named(job, following)}"
        steps.append(f"{_named(job, before)} before {_named(job, after)}{meets}")
    if len(steps) > _CYCLE_STEPS:
        steps[_CYCLE_STEPS:] = [f"... ({len(steps) - _CYCLE_STEPS} more)"]
    rank, index = cycle[0][0]
    trace = job.traces[rank]
    node = trace.analysis.program.nodes[index].id
    return Finding(trace.path, node, code, f"{what}: {'; '.join(steps)}", remedy)


def _named(job: CheckedJob, vertex: Vertex) -> str:
    rank, index = vertex
    return f"rank {rank} {job.traces[rank].analysis.program.nodes[index].label}"
