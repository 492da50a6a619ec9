"""The place at which the gathered parameters of a region are dropped."""

from collections.abc import Sequence

from stagec.api import Module, Operation, Region, Value
from stagec.ir.traits import Accumulates, Recasts


def reshard_behind(module: Module, region: Region, values: Sequence[Value]) -> None:
    """Drop values after the last forward or backward op of their region; with an accumulation or a
    pipeline, directly after the microbatches."""
    ops = region.ops[:-1]
    steps = next((i for i, op in enumerate(ops) if op.has(Accumulates)), len(ops))
    ran = [op for op in ops[: steps + 1] if not _is_of_reduction(op)]
    if values and ran:
        phase = next((op.phase for op in reversed(ran) if op.phase != "recompute"), ran[-1].phase)
        module.after(ran[-1], loc=values[0].loc, phase=phase).op("stg.reshard", values, types=())


def _is_of_reduction(op: Operation) -> bool:
    """Whether an op reduces gradients, casts them for a reduction, or belongs to the update."""
    late = ("gradient", "optimizer")
    users = {user.phase for result in op.results for user, _ in result.uses}
    return op.phase in late or (op.has(Recasts) and bool(users) and users <= {*late})
