"""Gathers of parameters in a region, and the parameters that they gather."""

from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import is_parameter
from stagec.ir.traits import Recasts, Repeats, View
from stagec.ir_spec.ops.comm import AllGather


def is_of_parameter(value: Value) -> bool:
    """Whether a value is a parameter, possibly cast, viewed or gathered."""
    op = value.producer
    if op is None or not op.operands:
        return is_parameter(value)
    whole = isinstance(op.definition, AllGather) or op.has(Recasts) or op.has(View)
    return is_of_parameter(op.operands[0]) if whole else is_parameter(value)


def gathers_of(region: Region) -> list[Operation]:
    """The gathers of parameters directly in a region."""
    gathers = [op for op in region.ops if isinstance(op.definition, AllGather)]
    return [op for op in gathers if is_parameter(op.operands[0])]


def single_gathers_of(region: Region) -> list[Operation]:
    """The gathers of single parameters in a region. Raises `DiagnosticError` for a call of
    several."""
    gathers = gathers_of(region)
    for op in gathers:
        if len(op.results) > 1:
            raise op.error(
                f"'{op.name}' gathers {len(op.results)} parameters in one call, but this pass "
                "decides for each parameter",
                remedy="run 'coalesce-collectives' after this pass",
            )
    return gathers


def ahead_of(gather: Operation) -> int:
    """The number of iterations by which a repeat issues a gather of parameters early."""
    return gather.integer("ahead", 1)


def source_of(gather: Operation) -> Value:
    """The stacked parameter of which the operand of a gather is a slice; the operand itself if all
    layers share it."""
    slice_ = gather.operands[0]
    return slice_.region.owner.operands[slice_.index] if is_sliced(gather) else slice_


def is_sliced(gather: Operation) -> bool:
    """Whether a gather in a repeat gathers the slice of each layer, not a parameter that all layers
    share."""
    owner = gather.operands[0].region.owner
    return owner.has(Repeats) and owner is gather.parent_op
