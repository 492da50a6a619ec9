"""Gathers of parameters: which there are, and of what."""

from __future__ import annotations

from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import is_parameter
from stagec.ir_spec.ops.comm import AllGather


def gathers_of(region: Region) -> list[Operation]:
    """The gathers of parameters in a region, not in those inside it."""
    return [
        op
        for op in region.ops
        if isinstance(op.definition, AllGather) and is_parameter(op.operands[0])
    ]


def source_of(gather: Operation) -> Value:
    """The stacked parameter that a gather's operand is a slice of."""
    slice_ = gather.operands[0]
    return slice_.region.owner.operands[slice_.index]
