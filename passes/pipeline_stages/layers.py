"""Values of a training step with a dimension of layers, of which each stage has a part.

The values that repeats slice and stack have their iterations as first dimension. The index rules of
ops propagate this dimension to gradients, updated parameters and optimizer state:

    %y, %H  = stg.repeat[count = L, carry = 1] (%h = %x, %w = %W)    %W and %H count layers
    %g_sum  = stg.sum["lbd->bd"](%H)                                 %g_sum does not, it is a sum
    %W_new, %m_new = stg.sgd(%W, %g_W, %m)                           %m and the results do, as %W

A dimension of equal size that is not derived from a repeat does not count.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stagec.api import Operation, Region, Value
from stagec.ir.rewrite import carried
from stagec.ir.traits import Accumulates, Repeats, Terminates
from stagec.ir_spec.ops.comm import Movement


class LayerDim(NamedTuple):
    """A dimension of a value, and the number of the repeat whose iterations it counts."""

    dim: int
    repeat: int


def runs_layers(op: Operation) -> bool:
    """Whether an operation runs layers: its iterations take slices or stack results. The rounds of
    a ring only carry values, so a ring is one operation of its layer.

    | operation                                     | runs layers |
    |-----------------------------------------------|-------------|
    | `stg.repeat` of a parameter's slices          | yes         |
    | `stg.repeat[carry = 3] (%q, %k, %v)` of a ring | no          |
    | `stg.add`                                     | no          |
    """
    return op.region is not None and max(len(op.operands), len(op.results)) > carried(op)


def layer_dims(repeats: Iterable[Sequence[Operation | None]]) -> dict[Value, LayerDim]:
    """The dimension of layers of each value in an accumulation and around it; `repeat` is the index
    of the repeat in its row. Where repeats share a value, the first one counts."""
    dims: dict[Value, LayerDim] = {}
    for row in repeats:
        for number, repeat in enumerate(row):
            if repeat is None:
                continue
            first = [*repeat.operands[carried(repeat) :], *repeat.results[carried(repeat) :]]
            pending = [(value, LayerDim(0, number)) for value in first]
            while pending:
                value, counts = pending.pop()
                if value not in dims:
                    dims[value] = counts
                    alike = _alike(value, counts.dim)
                    pending += ((other, LayerDim(dim, number)) for other, dim in alike)
    return dims


def _alike(value: Value, dim: int) -> Iterator[tuple[Value, int]]:
    """The values and dimensions that have the same layers as a dimension of this value, by the op
    that makes it and the ops that use it."""
    op = value.producer
    if isinstance(value.owner, Region) and value.owner.owner.has(Accumulates):
        yield value.owner.owner.operands[value.index], dim
    if op is not None and op.has(Accumulates):
        yield op.body.terminator.operands[value.index], dim
    elif op is not None:
        yield from _alike_in(op, len(op.operands) + value.index, dim)
    for user, slot in value.uses:
        around = user.parent_op
        if around is None or around.has(Repeats):
            continue  # used whole, by each layer
        if user.has(Accumulates):
            yield user.body.args[slot], dim
        elif user.has(Terminates) and around.has(Accumulates):
            yield around.results[slot], dim
        else:
            yield from _alike_in(user, slot, dim)


def _alike_in(op: Operation, place: int, dim: int) -> Iterator[tuple[Value, int]]:
    """The same by one op without layers; `place` is an index into its operands and results."""
    values = [*op.operands, *op.results]
    if op.has(Repeats) and not dim:
        alike = (*op.operands[carried(op) :], *op.results[carried(op) :])
        yield from ((value, 0) for value in alike)
        return
    if isinstance(op.definition, Movement):
        count = len(op.operands)
        yield values[place - count if place >= count else place + count], dim
        return
    rule = op.definition.rule(op) if op.region is None else None
    if rule is not None:
        shapes = (*rule.operands, *rule.results)
        counted = shapes[place][dim]
        for value, shape in zip(values, shapes, strict=False):
            if counted in shape:
                yield value, shape.index(counted)
