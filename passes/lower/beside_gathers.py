"""Kernels of products that start before their operand is gathered completely."""

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
#: Attributes of the nodes for one step of a computation, and for all its other steps together.
Parts = MemoByType[tuple[Attrs, Attrs]]
NodesOf = Callable[[Sequence[Value]], list[Value]]
AttrsOf = Callable[[Sequence[Operation]], Attrs]


class KernelsBesideGathers:
    """Kernels of products of a value that is gathered over n ranks. They run in n steps along the
    gathered dimension: all but the last one overlap with the gather and use the parts that have
    arrived."""

    def __init__(self, parts: Parts, facts: Facts) -> None:
        self._parts, self._facts = parts, facts
        #: By the first op of a kernel: the node of all steps but the last, and the attributes of
        #: the last.
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
        """The node of the last step of a kernel; `deps` gives the nodes of values, `attributes`
        those of a node. The first kernel that uses the gathered value also starts the others before
        it waits. None if the kernel has to wait for the complete value."""
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
        """Add the node of all steps of a kernel but the last."""
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
    """Note the operation from which a node is lowered."""
    made.origin = origin
