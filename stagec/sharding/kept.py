"""What becomes of gathered parameters between forward and backward (FSDP's reshard_after_forward).

Backward of a repeat gathers the slices of its parameters again unless the policy keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import const
from stagec.ir.module import Module, is_parameter
from stagec.ir_spec.ops.comm import AllGather


def keep_parameters(module: Module, policy: str) -> None:
    """Keep what forward gathered: of no iteration (`always` reshard), of all (`never`), or of the
    last one, with which backward begins (`last`). In place."""
    if policy == "always":
        return
    for func in module.functions:
        for forward, back, mine, again in list(_pairs(func.body)):
            if policy == "last":
                mine.attrs["keep"] = again.attrs["kept"] = const(1)
            else:
                again.result.replace_with(_handed_over(forward, back, mine.result))
                again.erase()


def _pairs(region: Region) -> Iterator[tuple[Operation, Operation, Operation, Operation]]:
    """Gathers of one parameter in a repeat and in the repeat that runs back over it: both repeats,
    both gathers."""
    for op in region.ops:
        if op.region is not None:
            yield from _pairs(op.region)
    repeats = [op for op in region.ops if op.definition.carries]
    for back in (op for op in repeats if op.phase == "backward"):
        for forward in (op for op in repeats if op.phase == "forward"):
            for mine in _gathers(forward):
                for again in _gathers(back):
                    if _source(mine) is _source(again) and _alike(mine, again):
                        yield forward, back, mine, again


def _gathers(repeat: Operation) -> list[Operation]:
    return [
        op
        for op in repeat.body.ops
        if isinstance(op.definition, AllGather) and is_parameter(op.operands[0])
    ]


def _source(gather: Operation) -> Value:
    """The stacked parameter that a gather's operand is a slice of."""
    slice_ = gather.operands[0]
    return slice_.region.owner.operands[slice_.index]


def _alike(a: Operation, b: Operation) -> bool:
    return all(a.attrs.get(n) == b.attrs.get(n) for n in ("dim", "over"))


def _handed_over(forward: Operation, back: Operation, value: Value) -> Value:
    """The argument of `back` that brings a value of `forward`, iteration by iteration."""
    forward.body.terminator.add_operand(value)
    stacked = value.tensor.stacked(forward.expr("count"))
    back.add_operand(forward.add_result(f"kept_{value.name}", stacked, value.loc))
    return back.body.add_arg(value.name, value.tensor, value.loc)
