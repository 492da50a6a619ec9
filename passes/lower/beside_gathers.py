"""Kernels of products that begin before all of what they take is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from stagec.api import Builder, Facts, Operation, Value, axis_size
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ZERO
from stagec.ir.memo import MemoByType
from stagec.passes.lower.steps import (
    ACTIVATIONS,
    Gathered,
    gathered_for,
    kernels_beside,
    shared_out,
)
from stagec.sharding.work import viewed

Attrs = dict[str, RawAttr]
#: What nodes say of one of the steps that a computation works in, and of the others together.
Parts = MemoByType[tuple[Attrs, Attrs]]
NodesOf = Callable[[Sequence[Value]], list[Value]]
AttrsOf = Callable[[Sequence[Operation]], Attrs]


class KernelsBesideGathers:
    """Kernels of products of what is gathered over n ranks, which work in n steps along the
    dimension that is gathered: all but the last beside the gather, on the parts that are there."""

    def __init__(self, parts: Parts, facts: Facts) -> None:
        self._parts, self._facts = parts, facts
        #: Of kernels by their first op: all steps but the last, and what the last one does.
        self._early: dict[Operation, tuple[Value, Attrs]] = {}
        self._awaited: set[Value] = set()  # gathers that a kernel has waited for

    def node(
        self,
        ops: Sequence[Operation],
        gathered: Gathered,
        b: Builder,
        deps: NodesOf,
        attributes: AttrsOf,
    ) -> Value | None:
        """The last step of a kernel, by the nodes of values and what a node says of a kernel. The
        first kernel that takes the value lets the others begin, too, before it waits; None if a
        kernel has to wait for all of the value."""
        (whole,) = deps([gathered.value])
        if ops[0] not in self._early:
            if whole in self._awaited:
                return None
            self._awaited.add(whole)
            for kernel in ([*ops], *kernels_beside(ops, gathered.value)):
                self._begin(kernel, b, deps, attributes)
        begun, last = self._early.pop(ops[0])
        return b.value("et.comp", [begun, whole], last, hint=ops[-1].results[0].name)

    def _begin(
        self, ops: Sequence[Operation], b: Builder, deps: NodesOf, attributes: AttrsOf
    ) -> None:
        """All steps but the last of a kernel."""
        gathered = gathered_for(ops, ACTIVATIONS)
        if gathered is None:
            return
        steps = axis_size(gathered.gather.names("over"))
        if len(ops) == 1:
            last, first = self._parts(ops[0], gathered.along[ops[0]], steps)
        else:
            last, first = shared_out(attributes(ops), gathered.along, steps, self._facts)
        known = {gathered.value, *(result for op in ops for result in op.results)}
        others = [viewed(v) for op in ops for v in op.operands if viewed(v) not in known]
        own = Builder(b.registry, b.region, loc=ops[0].loc, phase=ops[0].phase)
        own.finish = partial(came_from, ops[-1])
        there = list(dict.fromkeys(deps([*gathered.gather.operands, *others])))
        name = f"{ops[-1].results[0].name}_first"
        self._early[ops[0]] = own.value("et.comp", there, {**first, "out": ZERO}, hint=name), last


def came_from(origin: Operation, made: Operation) -> None:
    """Note the operation that a node is made of."""
    made.origin = origin
