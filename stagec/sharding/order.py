"""Dimensions whose positions are distributed over ranks in zigzag order, and the ops that support
them."""

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation
from stagec.ir.own_gathers import own_gathers
from stagec.ir.types import Dim
from stagec.ir_spec.ops.comm import Collective

Axes = tuple[str, ...]


def misordered(op: Operation, order: Mapping[str, Axes]) -> Iterator[str]:
    """Messages for an operation that assumes another order of positions than the module states
    (`Module.zigzag`).

    | operation, with `stg.zigzag[S, over = cp]`            | wrong                               |
    |-------------------------------------------------------|-------------------------------------|
    | `stg.all_gather[dim = 1, over = tp]` of `S@(cp, tp)`  | no: tp splits what a rank of cp has |
    | `stg.all_gather[dim = 1, over = cp]` of `S@cp`        | yes: the result is permuted         |
    | `stg.reshape["b(ps)->bps"]` of `S@cp`                 | yes: a part is no run of positions  |
    | `stg.attention_block[over = cp, order = plain]`       | yes: stated otherwise               |
    """
    if "order" in op.attrs and op.region is None:
        yield from _steps(op, order)
    elif order:
        yield from _permuted(op, order)
        yield from _cut(op, order)


def _steps(op: Operation, order: Mapping[str, Axes]) -> Iterator[str]:
    """Messages for a step of a ring, which states its order itself."""
    over = op.names("over")
    dims = [d for v in op.operands for d in v.tensor.dims if set(over) <= set(d.axes)]
    stated = "zigzag" if any(_ordered(d, order) == over for d in dims) else "plain"
    if op.text("order") != stated:
        yield f"is for {op.text('order')} order, but the module states {stated} order"


def _cut(op: Operation, order: Mapping[str, Axes]) -> Iterator[str]:
    """Messages for a rule that cuts or joins a dimension, which assumes that a rank has one
    contiguous piece of it, and for an op that gathers it, which assumes consecutive parts."""
    rule = op.definition.rule(op)
    if rule is None:
        return
    values = [*zip(op.operands, rule.operands, strict=False)]
    values += zip(op.results, rule.results, strict=False)
    for value, shape in values:
        for d, group in zip(value.tensor.dims, shape, strict=False):
            if len(group) > 1 and set(_ordered(d, order)) & set(d.axes):
                yield f"splits {d.size}, {_parts(d, order)}"
                return
    for own in own_gathers(op, rule):
        d = op.operands[own.operand].tensor.dims[own.dim]
        if set(_ordered(d, order)) & set(own.over):
            yield f"gathers {d.size}, {_parts(d, order)}"


def _parts(d: Dim, order: Mapping[str, Axes]) -> str:
    return f"whose parts on the ranks of {', '.join(_ordered(d, order))} are in zigzag order"


def _permuted(op: Operation, order: Mapping[str, Axes]) -> Iterator[str]:
    """Messages for a collective, which joins or cuts the parts in the order of the ranks."""
    if not isinstance(op.definition, Collective) or "dim" not in op.attrs:
        return
    over = set(op.names("over"))
    for value in (*op.operands, *op.results):
        for d in value.tensor.dims:
            if over & set(_ordered(d, order)) & set(d.axes):
                yield f"moves {d.size}, {_parts(d, order)}"
                return


def _ordered(d: Dim, order: Mapping[str, Axes]) -> Axes:
    """The axes over which a dimension is in zigzag order."""
    return order.get(d.size.symbol_name or "", ())
