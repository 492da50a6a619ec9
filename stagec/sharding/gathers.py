"""Gathers of parameters: which ones a region has, and what they gather."""

from __future__ import annotations

from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import is_parameter
from stagec.ir_spec.ops.comm import AllGather
from stagec.support.diagnostics import error


def gathers_of(region: Region) -> list[Operation]:
    """The gathers of parameters in a region, not in those inside it."""
    return [
        op
        for op in region.ops
        if isinstance(op.definition, AllGather) and is_parameter(op.operands[0])
    ]


def single_gathers_of(region: Region) -> list[Operation]:
    """The same, of one parameter each. Raises `DiagnosticError` for a call of several."""
    found = gathers_of(region)
    for op in found:
        if len(op.results) > 1:
            raise error(
                f"'{op.name}' gathers {len(op.results)} parameters in one call, but what becomes "
                "of each is decided before",
                op.loc,
                remedy="run 'coalesce-collectives' later",
            )
    return found


def ahead_of(gather: Operation) -> int:
    """How many iterations early a repeat issues a gather of parameters."""
    return gather.integer("ahead", 1)


def source_of(gather: Operation) -> Value:
    """The stacked parameter that a gather's operand is a slice of."""
    slice_ = gather.operands[0]
    return slice_.region.owner.operands[slice_.index]
