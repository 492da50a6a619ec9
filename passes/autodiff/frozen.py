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
from stagec.ir.trained import trained_values
from stagec.ir_spec.ops.parts import Arrive


def idle_values(module: Module) -> frozenset[Value]:
    """The values of the main function that need no gradient; none at all if nothing is frozen."""
    trained = set(module.trainable())
    if len(trained) == len(module.parameters()):
        return frozenset()
    body = module.main.body
    ends = (op for op in body.walk() if isinstance(op.definition, Arrive) and op.flag("trained"))
    trained_set = trained_values(body, trained | {op.result for op in ends})
    values = [*body.args, *(v for op in body.walk() for v in _values(op))]
    return frozenset(v for v in values if v not in trained_set)


def _values(op: Operation) -> Iterable[Value]:
    return (*op.results, *(op.region.args if op.region is not None else ()))
