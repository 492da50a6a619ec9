"""Stacks of layers of several kinds, said plainly and slowly: which layer runs when."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stagec.ir.core import Operation, Region
from stagec.ir.traits import Repeats


def layers_of(op: Operation) -> list[tuple[Operation, int]]:
    """Of a repeat whose layers run among those of others: all layers in the order in which they
    run, each the repeat that it belongs to and its number there."""
    root = op
    while root.parent_op is not None:
        root = root.parent_op
    declared = [o for o in root.body.ops if o.name == "stg.order"]
    (order,) = [o for o in declared if f"@{o.symbol}" == str(op.attrs["order"])]
    kinds, seen, actual = {o.symbol: o for o in beside(op)}, Counter[str](), list[tuple[str, int]]()
    for kind in _expanded(order.attrs["layers"]):
        actual.append((kind, seen[kind]))
        seen[kind] += 1
    layers = [(kinds[kind], i) for kind, i in actual if kind in kinds]
    return layers[::-1] if op.flag("reverse") else layers


def place_of(op: Operation, i: int) -> int:
    """The number of a layer in its stack."""
    if not op.has(Repeats) or "order" not in op.attrs:
        return i
    layers = layers_of(op)
    assert len(beside(op)) == len({o for o, _ in layers})
    return (layers[::-1] if op.flag("reverse") else layers).index((op, i))


def beside(op: Operation) -> list[Operation]:
    """The repeats of the same stack: of the same order, direction, phase and region."""
    ops = op.parent.ops if op.parent else []
    if not op.has(Repeats) or "order" not in op.attrs:
        return [op]
    return [o for o in ops if o.has(Repeats) and _sort(o) == _sort(op)]


def _sort(op: Operation) -> tuple[object, ...]:
    return str(op.attrs.get("order")), op.phase, op.flag("reverse"), op.integer("carry", 1)


def _expanded(order: Any) -> list[str]:
    return [
        kind
        for what, times in order.runs
        for kind in ([what] if isinstance(what, str) else _expanded(what)) * times
    ]


def as_they_run(region: Region) -> list[Operation]:
    """The operations of a region; of repeats that run as one stack the first one, behind what any
    of them needs."""
    actual: list[Operation] = []

    def take(op: Operation | None) -> None:
        if op is None or op.parent is not region or op in actual or op is region.ops[-1]:
            return
        for other in beside(op):
            if other is not op and other not in actual:
                actual.append(other)
                for value in other.operands[other.integer("carry", 1) :]:
                    take(value.producer)
        actual.append(op)

    for op in region.ops:
        take(op)
    return [op for op in actual if op is beside(op)[0]]
