"""Which part of a model has what, once `stg.cross` marks where parts end.

    %e  = stg.layernorm(%y0, %w)                          encoder
    %ec = stg.cross[e, source = encoder, to = main](%e)
    %l  = stg.cross_entropy(...%ec...)                    main
    %d  = ...                                             main
    %de = stg.cross[d_e, source = main, to = encoder](%d)
    %dw = stg.layernorm_weight_grad(%de, ...)             encoder

A part has what can be computed without what the other parts get: of `%dw` the encoder alone, of
`%l` main alone. What every part can compute (an argument, a mask) each computes for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import Module
from stagec.ir.reach import reached
from stagec.ir_spec.ops.parts import MAIN, Cross
from stagec.support.diagnostics import error


def crosses(body: Region) -> list[Operation]:
    """The operations of a function that mark where parts end, in order."""
    return [op for op in body.walk() if isinstance(op.definition, Cross)]


def part_names(body: Region) -> list[str]:
    """The parts between which values cross, `main` first; none if nothing crosses."""
    ends = [op.text(end) for op in crosses(body) for end in ("source", "to")]
    return sorted(set(ends), key=lambda name: (name != MAIN, name))


def beyond(body: Region, part: str) -> set[Value]:
    """The values that take what other parts get, so that this part does not have them."""
    found = crosses(body)
    theirs = [op.result for op in found if op.text("to") != part]
    return reached(body, theirs, lambda op: isinstance(op.definition, Cross))


def parts_of(module: Module, values: Iterable[Value]) -> Mapping[Value, str]:
    """The part that has each of these values of the function: `main` what no other part has alone.

    Raises `DiagnosticError` for a value that takes what two parts get.
    """
    body = module.main.body
    lacking = {name: beyond(body, name) for name in part_names(body) or [MAIN]}
    return {value: _part_of(value, lacking) for value in values}


def _part_of(value: Value, lacking: Mapping[str, set[Value]]) -> str:
    owners = [name for name, others in lacking.items() if value not in others]
    if not owners:
        raise error(
            f"%{value.name} takes what several parts get: {', '.join(lacking)}",
            value.loc,
            remedy="use each parameter in one part",
        )
    return owners[0]


def departs(region: Region) -> Iterator[Operation]:
    """The ends of crossings that a region has, of values that leave."""
    return (op for op in region.walk() if op.name == "stg.depart")
