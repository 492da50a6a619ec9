"""Which values need no gradient because no trained parameter has a part in them.

With a frozen tower in front of a model that is trained,

    %v = stg.repeat[count = L] (%h = %image, %w = %frozen) { ... }
    %e = stg.einsum["bnd,de->bne"](%v, %w1)

%v has none, and nothing of the tower is stashed. If `%w1` is frozen too, neither has `%e`. What
comes from another part of the model has one if that part trains it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagec.api import Module, Operation, Value
from stagec.ir.rewrite import carried
from stagec.ir_spec.ops.parts import Arrive


def idle_values(module: Module) -> frozenset[Value]:
    """The values of the main function that need no gradient; none at all if nothing is frozen."""
    trained = set(module.trainable())
    if len(trained) == len(module.parameters()):
        return frozenset()
    body = module.main.body
    ends = (op for op in body.walk() if isinstance(op.definition, Arrive) and op.flag("trained"))
    found = _Trained(trained | {op.result for op in ends})
    found.ops(body.ops)
    values = [*body.args, *(v for op in body.walk() for v in _values(op))]
    return frozenset(v for v in values if v not in found.values)


def _values(op: Operation) -> Iterable[Value]:
    return (*op.results, *(op.region.args if op.region is not None else ()))


class _Trained:
    """The values in which a trained parameter has a part."""

    def __init__(self, values: set[Value]) -> None:
        self.values = values

    def ops(self, ops: Iterable[Operation]) -> None:
        """Add the results of these operations."""
        for op in ops:
            if op.region is not None:
                self._region(op)
            elif any(v in self.values for v in op.operands):
                self.values.update(op.results)

    def _region(self, op: Operation) -> None:
        """Add what a region binds and yields; what it carries may be trained from the second
        iteration on."""
        body, count = op.body, carried(op)
        self._pass(op.operands, body.args)
        while True:
            self.ops(body.ops)
            before = len(self.values)
            self._pass(body.terminator.operands[:count], body.args)
            if len(self.values) == before:
                break
        self._pass(body.terminator.operands, op.results)

    def _pass(self, given: Iterable[Value], taken: Iterable[Value]) -> None:
        self.values.update(t for g, t in zip(given, taken, strict=False) if g in self.values)
