"""Positions that lie on ranks in zigzag order: what may be done with a dimension split so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.ir.types import Dim
from stagec.ir_spec.ops.comm import Collective

Axes = tuple[str, ...]


def misordered(module: Module) -> Iterator[tuple[Operation, str]]:
    """Operations, with what is wrong, that take positions to be in another order than stated.

    | operation, with `stg.zigzag[S, over = cp]`            | wrong                               |
    |-------------------------------------------------------|-------------------------------------|
    | `stg.all_gather[dim = 1, over = tp]` of `S@(cp, tp)`  | no: tp splits what a rank of cp has |
    | `stg.all_gather[dim = 1, over = cp]` of `S@cp`        | yes: the result is permuted         |
    | `stg.attention_block[over = cp, order = plain]`       | yes: stated otherwise               |
    """
    order = module.zigzag
    for func in module.functions:
        for op in func.body.walk():
            if "order" in op.attrs:
                yield from _steps(op, order)
            elif order:
                yield from _permuted(op, order)


def _steps(op: Operation, order: Mapping[str, Axes]) -> Iterator[tuple[Operation, str]]:
    """A step of a ring says its order itself."""
    over = op.names("over")
    dims = [d for v in op.operands for d in v.tensor.dims if set(over) <= set(d.axes)]
    stated = "zigzag" if any(_ordered(d, order) == over for d in dims) else "plain"
    if op.text("order") != stated:
        yield op, f"is for {op.text('order')} order, but the module states {stated} order"


def _permuted(op: Operation, order: Mapping[str, Axes]) -> Iterator[tuple[Operation, str]]:
    """What puts parts of ranks together, or cuts them apart, does so in the order of the ranks."""
    if not isinstance(op.definition, Collective) or "dim" not in op.attrs:
        return
    over = set(op.names("over"))
    for value in (*op.operands, *op.results):
        for d in value.tensor.dims:
            folded = _ordered(d, order)
            if over & set(folded) & set(d.axes):
                ranks = ", ".join(folded)
                yield (
                    op,
                    f"moves {d.size}, whose parts on the ranks of {ranks} are in zigzag order",
                )
                return


def _ordered(d: Dim, order: Mapping[str, Axes]) -> Axes:
    """The axes over which a dimension is in zigzag order."""
    return order.get(d.size.symbol_name or "", ())
