"""The proof that the ranks of a job cannot wait for each other in a circle.

Sends may wait for their receives to be posted (rendezvous) or not (eager). The former is proved
where the messages of each ordered pair of ranks are in order; it includes the latter.

The merged graph is built of rank classes first. Mapping each rank to its class maps a cycle to a
cycle, so classes without one prove that ranks have none. Otherwise ranks of a class that talk to
different classes are told apart, such as pipeline stages that run the same program; if there still
are cycles, ranks are looked at one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from stagec.check.agreement import CheckedJob, crossed_messages
from stagec.check.findings import CheckReport, Finding
from stagec.check.merged import Communication, Edge, MergedGraph, Vertex
from stagec.check.program import Analysis
from stagec.check.ranks import RankTrace

EXPANDED_NODES = 20_000_000
"""How many nodes are looked at rank by rank before the proof is given up."""

_CYCLE_STEPS = 12


def check_deadlock(
    job: CheckedJob, report: CheckReport, expanded_nodes: int = EXPANDED_NODES
) -> None:
    """Prove the merged graph free of cycles, or report one: with sends that wait for their receives
    where messages are in order, else with sends that do not.

    Says nothing about a job with a rank whose own dependencies are broken.
    """
    if not all(trace.analysis.sound for trace in job.traces.values()):
        return
    if report.sends:
        report.eager_only = _why_eager_only(job, expanded_nodes)
        if report.eager_only is None:
            return
    found = _cycle(job, expanded_nodes, rendezvous=False)
    if found is None:
        return
    if not found:
        message = "expected a provable job, found cycles between rank classes"
        remedy = "make ranks with the same program communicate in the same order"
        report.error(job.directory, "unproven", message, remedy)
        return
    what = "expected an order in which all ranks can run, found a cycle"
    remedy = "issue the collectives and messages of these ranks in one consistent order"
    wrong = _described(job, found, "deadlock", what, remedy)
    report.error(wrong.path, wrong.code, wrong.message, wrong.remedy, node=wrong.node)


def _why_eager_only(job: CheckedJob, expanded_nodes: int) -> Finding | None:
    """What keeps the job from ending if a send only completes when its receive is posted and
    messages from one rank to another are matched in order; None if it is proved to end."""
    crossed = next(crossed_messages(job), None)
    if crossed is not None:
        trace, node, message = crossed
        remedy = "issue the messages of two ranks in one order at both ends"
        return Finding(trace.path, node, "eager-only", message, remedy)
    found = _cycle(job, expanded_nodes, rendezvous=True)
    if found is None:
        return None
    remedy = "post receives earlier, or issue these messages in one consistent order"
    if not found:
        what = "cycles between rank classes are too large to look at rank by rank"
        return Finding(job.directory, None, "eager-only", what, remedy)
    what = "sends that wait for their receives deadlock"
    return _described(job, found, "eager-only", what, remedy)


def _cycle(job: CheckedJob, expanded_nodes: int, *, rendezvous: bool) -> list[Edge] | None:
    """A cycle of ranks; None if there is none, [] if that could not be proved."""
    classes: Mapping[int, int] = {t.rank: t.class_id for t in job.traces.values()}
    suspects = _suspects(job, classes, rendezvous)
    if suspects:
        classes = _told_apart(job, classes, expanded_nodes)
        suspects = _suspects(job, classes, rendezvous)
    if not suspects:
        return None
    keep = {rank: suspects[number] for rank, number in classes.items() if number in suspects}
    if sum(len(indices) for indices in keep.values()) > expanded_nodes:
        return []
    ranks = {rank: job.traces[rank].analysis for rank in keep}
    graph = MergedGraph(ranks, _communication(job, lambda trace: trace.rank, rendezvous), keep)
    core = graph.core()
    return graph.cycle(core) if core else None


def _told_apart(job: CheckedJob, classes: Mapping[int, int], most_nodes: int) -> Mapping[int, int]:
    """Finer classes: ranks of one have peers of the same classes, slot by slot. As fine as that, or
    as `most_nodes` of them allow."""
    count = len(set(classes.values()))
    while True:
        numbers: dict[tuple[int, ...], int] = {}
        finer: dict[int, int] = {}
        nodes = 0
        for rank, trace in job.traces.items():
            key = classes[rank], *(classes.get(peer, -1) for peer in trace.peers)
            if key not in numbers:
                numbers[key] = len(numbers)
                nodes += len(trace.analysis.deps)
            finer[rank] = numbers[key]
        if len(numbers) == count or nodes > most_nodes:
            return classes
        classes, count = finer, len(numbers)


def _suspects(
    job: CheckedJob, classes: Mapping[int, int], rendezvous: bool
) -> Mapping[int, set[int]]:
    """Per class, the nodes that are on a cycle of classes. `classes` has the class of each rank."""
    analyses = {classes[rank]: trace.analysis for rank, trace in job.traces.items()}
    talk = _communication(job, lambda trace: classes[trace.rank], rendezvous)
    graph = MergedGraph(analyses, talk)
    suspects: dict[int, set[int]] = defaultdict(set)
    for edge in graph.core():
        for class_id, index in edge:
            suspects[class_id].add(index)
    return suspects


def _communication(
    job: CheckedJob, unit: Callable[[RankTrace], int], rendezvous: bool
) -> Communication:
    """How the units that ranks belong to meet, each distinct way once."""
    traces = job.traces
    analyses = {unit(trace): trace.analysis for trace in traces.values()}
    channels = {
        (unit(traces[src]), unit(traces[dst]), src_slot, dst_slot): None
        for src, dst, src_slot, dst_slot in _channels(job)
    }
    meetings = {
        (unit(traces[one]), unit(traces[other]), one_slot, other_slot): None
        for one, other, one_slot, other_slot in _neighbours(job)
    }
    return Communication(
        messages=(
            edge
            for src, dst, src_slot, dst_slot in channels
            for send, receive in _matched(analyses[src], src_slot, analyses[dst], dst_slot)
            for edge in _waits((src, send), (dst, receive), analyses[dst], rendezvous)
        ),
        meetings=(
            ((one, first.index), (other, second.index))
            for one, other, one_slot, other_slot in meetings
            for first, second in zip(
                analyses[one].collectives.get(one_slot, ()),
                analyses[other].collectives.get(other_slot, ()),
                strict=False,
            )
        ),
    )


def _channels(job: CheckedJob) -> Iterator[tuple[int, int, int, int]]:
    """Sender and receiver, and the slot that each has for the other."""
    for src, trace in job.traces.items():
        for slot, dst in enumerate(trace.peers):
            back = job.peer_slots.get(dst, {}).get(src)
            if back is not None and slot in trace.analysis.sends:
                yield src, dst, slot, back


def _neighbours(job: CheckedJob) -> Iterator[tuple[int, int, int, int]]:
    """Pairs of ranks that chain all ranks using a group, and the slots of the group on them."""
    for slots in job.group_slots.values():
        for (one, one_slot), (other, other_slot) in pairwise(slots.items()):
            yield one, other, one_slot, other_slot


def _matched(
    src: Analysis, src_slot: int, dst: Analysis, dst_slot: int
) -> Iterator[tuple[int, int]]:
    """Indices of sends and their receives: first in, first out for each tag and size."""
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    for receive in reversed(dst.receives.get(dst_slot, ())):
        waiting[receive.tag, receive.size].append(receive.index)
    for send in src.sends[src_slot]:
        receives = waiting[send.tag, send.size]
        if receives:
            yield send.index, receives.pop()


def _waits(send: Vertex, receive: Vertex, there: Analysis, rendezvous: bool) -> Iterator[Edge]:
    """The receive waits for the send, which waits until the receive is posted if it has to: until
    all is done that the receive waits for on its own rank."""
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
