"""Values that need no gradient because they depend on no trained parameter.

With a frozen tower in front of a trained model,

    %v = stg.repeat[count = L] (%h = %image, %w = %frozen) { ... }
    %e = stg.einsum["bnd,de->bne"](%v, %w1)

%v needs no gradient, and the tower stashes nothing. If `%w1` is frozen too, neither does `%e`. A
value from another part of the model needs one if that part trains it.
"""

from collections.abc import Iterable

from stagec.api import Module, Operation, Value
from stagec.ir.trained import trained_values
from stagec.ir_spec.ops.parts import Arrive


def idle_values(module: Module) -> frozenset[Value]:
    """The values of the main function that need no gradient; empty if no parameter is frozen."""
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
