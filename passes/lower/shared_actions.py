"""Equal actions of a pipeline: the region of the first one that is lowered serves for all."""

from collections.abc import Mapping
from typing import NamedTuple

from stagec.api import Region, Value
from stagec.ir.alike import captured, counterparts

#: The nodes of the values that an action captures; None for a value without a node.
Taken = Mapping[Value, Value | None]


class _Lowered(NamedTuple):
    source: Region
    region: Region
    taken: Taken


class SharedActions:
    """The regions of lowered actions. The nodes that an action captures are the arguments of its
    region."""

    def __init__(self) -> None:
        self._known: list[_Lowered] = []

    def add(self, source: Region, region: Region, taken: Taken) -> None:
        """Offer the region to which an action was lowered."""
        self._known.append(_Lowered(source, region, taken))

    def like(
        self, body: Region, nodes: Mapping[Value, Value], late: Mapping[Value, object]
    ) -> tuple[Region, list[Value]] | None:
        """The region of an action equal to this one, and the nodes that this one takes; None if
        there is none. `late` are values whose users wait for more than one node."""
        for known in self._known:
            values = counterparts(known.source, body)
            if values is not None and late.keys().isdisjoint(values[v] for v in known.taken):
                given = _given(known.taken, {v: nodes.get(values[v]) for v in known.taken})
                if given is not None:
                    return known.region, given
        return None


def taken_by(body: Region, nodes: Mapping[Value, Value]) -> Taken:
    """The nodes of the values that an action captures."""
    return {value: nodes.get(value) for value in captured(body)}


def nodes_of(taken: Taken) -> list[Value]:
    """The nodes among these, each once, in order."""
    return list(dict.fromkeys(node for node in taken.values() if node is not None))


def _given(taken: Taken, here: Taken) -> list[Value] | None:
    """The nodes `here` that correspond to those that an action takes; None if they do not
    correspond one to one."""
    pairs = {(node, here[value]) for value, node in taken.items()}
    mine, others = dict(pairs), {other for _, other in pairs}
    if not len(mine) == len(others) == len(pairs) or mine.get(None) is not None:
        return None
    nodes = nodes_of(taken)
    given = [other for node in nodes if (other := mine[node]) is not None]
    return given if len(given) == len(nodes) else None
