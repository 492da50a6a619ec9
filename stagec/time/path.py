"""The critical path of a step: the chain of nodes of which each starts when the one before ends."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from stagec.program.nodes import Node
from stagec.time.clock.times import ClassTimes, ClockedStep
from stagec.time.streams import Part


class Link(NamedTuple):
    """A node of the path, its class and category, and the picoseconds from the end of the node
    before to its own end. The links of a path add up to the step."""

    owner: ClassTimes
    node: Node
    part: Part
    time: int


def critical_path(step: ClockedStep) -> Iterator[Link]:
    """The path, from the end of the step to its start."""
    firsts = [each.nodes.first for each in step]
    _, ends, causes = step.ran
    node = next((each.last for each in step if each.end == step.end and len(each)), -1)
    while node >= 0:
        owner = step[bisect_right(firsts, node) - 1]
        placed, before = owner.placed(node), int(causes[node])
        begun = int(ends[before]) if before >= 0 else 0
        yield Link(owner, placed.node, placed.part, int(ends[node]) - begun)
        node = before


def shared_time(step: ClockedStep) -> int:
    """Picoseconds of the path for the tokens of several groups of ranks: experts of routed tokens,
    and what gathers tokens. An all_to_all is that of the group with most tokens, which sends
    them."""
    return sum(
        link.time
        for link in critical_path(step)
        if link.node.op is not None and link.node.op.flag("shared")
    )
