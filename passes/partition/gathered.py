"""Gathers of parameters: which there are, of what, and where their results are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.api import Builder, Module, Operation, Region, Value, is_parameter
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


def reshard_behind(module: Module, region: Region, values: Sequence[Value]) -> None:
    """Drop values when the last forward or backward of their region has run."""
    ran = [op for op in region.ops[:-1] if not _is_of_reduction(op)]
    if values and ran:
        after = Builder.after(module.registry, ran[-1], loc=values[0].loc)
        after.op("stg.reshard", values, types=())


def _is_of_reduction(op: Operation) -> bool:
    """Whether an op reduces gradients, casts them for that, or uses them."""
    late = ("gradient", "optimizer")
    users = {user.phase for result in op.results for user, _ in result.uses}
    return op.phase in late or (op.definition.recasts and bool(users) and users <= {*late})
