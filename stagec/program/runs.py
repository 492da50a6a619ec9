"""The nodes of a rank in the order of issue, as runs: what is the same again and again is said
once.

A run is a part of a template at one place of the program, or nodes that stand for themselves.
Programs of hundreds of thousands of nodes have a few thousand runs, of a few dozen kinds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagec.program.buckets import Bucketed, completed_by
from stagec.program.columns import cut_buckets
from stagec.program.groups import crosses_pods, tag_step
from stagec.program.nodes import MICROBATCH, Node, marker_of
from stagec.program.stamp import Instance, Template


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """Nodes that stand for themselves, with handles one after the other."""

    nodes: Sequence[Node]


class RunKind(NamedTuple):
    """What a run is a run of: `nodes[first:last]` of its source."""

    source: Template | Straight
    first: int
    last: int

    @property
    def nodes(self) -> Sequence[Node]:
        """Its nodes, in the order of issue."""
        return self.source.nodes[self.first : self.last]

    def place(self, node: Node) -> int:
        """Where a node that one of it waits for is: in the table of an instance, or its handle."""
        return self.source.place(node) if isinstance(self.source, Template) else node.id


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a kind. Its nodes have the handles `start`, `start + 1`, ..."""

    kind: RunKind
    start: int
    instance: Instance | None = None

    def tag(self, node: Node) -> int:
        """The tag of a message of the run; both of its ends have the same."""
        instance = self.instance
        if instance is None or node.op is None:
            return node.tag
        if crosses_pods(node.op):
            mark = marker_of(node.name)
            microbatch = instance.microbatches[MICROBATCH.index(mark)] if mark else 0
            return node.tag + microbatch * tag_step(node.op)
        return node.tag + instance.tags[instance.template.stream(node)]

    def part(self, first: int, last: int) -> Run:
        """A part of it, counted in the nodes of its kind."""
        kind = self.kind._replace(first=self.kind.first + first, last=self.kind.first + last)
        return Run(kind, self.start + first, self.instance)


def issued_runs(
    order: Sequence[Node | Instance], bucketed: Sequence[Bucketed | Instance]
) -> list[Run]:
    """The runs of a rank. Buckets stand right after what completes them, so they divide runs."""
    found = [run for run in _whole(order) if run.kind.first < run.kind.last]
    calls = {run.start: run for run in _calls(bucketed)}
    cuts: dict[int, list[tuple[int, list[Run]]]] = {}
    starts = [run.start for run in found]
    for ready, handles in completed_by(list(cut_buckets(bucketed))).items():
        mine = [calls[h] for h in handles]
        at = 0 if ready is None else bisect_right(starts, ready) - 1
        offset = 0 if ready is None else ready + 1 - starts[at]
        cuts.setdefault(at, []).append((offset, mine))
    result: list[Run] = []
    for i, run in enumerate(found):
        at = 0
        for offset, mine in sorted(cuts.get(i, ()), key=lambda cut: cut[0]):
            if offset > at:
                result.append(run.part(at, offset))
                at = offset
            result += mine
        if at < run.kind.last - run.kind.first:
            result.append(run.part(at, run.kind.last - run.kind.first) if at else run)
    return result


def _whole(order: Sequence[Node | Instance]) -> Iterator[Run]:
    straight: list[Node] = []
    for thing in order:
        if isinstance(thing, Node) and (not straight or thing.id == straight[-1].id + 1):
            straight.append(thing)
            continue
        if straight:
            yield _alone(straight)
        straight = [thing] if isinstance(thing, Node) else []
        if isinstance(thing, Instance):
            yield Run(RunKind(thing.template, 0, thing.template.ordered), thing.base, thing)
    if straight:
        yield _alone(straight)


def _alone(nodes: Sequence[Node]) -> Run:
    return Run(RunKind(Straight(nodes), 0, len(nodes)), nodes[0].id)


def _calls(bucketed: Sequence[Bucketed | Instance]) -> Iterator[Run]:
    for cut in bucketed:
        if isinstance(cut, Instance):
            for place, _ in cut.template.buckets:
                yield Run(RunKind(cut.template, place, place + 1), cut.base + place, cut)
        else:
            yield from (_alone([node]) for node in cut.nodes)
