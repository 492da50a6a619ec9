"""Where the gathered parameters of a region are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.api import Builder, Module, Operation, Region, Value
from stagec.ir.traits import Accumulates, Recasts


def reshard_behind(module: Module, region: Region, values: Sequence[Value]) -> None:
    """Drop values when the last forward or backward of their region has run: of a pipeline, when
    its microbatches have, not behind what joins their results."""
    ops = region.ops[:-1]
    steps = next((i for i, op in enumerate(ops) if op.has(Accumulates)), len(ops))
    ran = [op for op in ops[: steps + 1] if not _is_of_reduction(op)]
    if values and ran:
        phase = next((op.phase for op in reversed(ran) if op.phase != "recompute"), ran[-1].phase)
        after = Builder.after(module.registry, ran[-1], loc=values[0].loc, phase=phase)
        after.op("stg.reshard", values, types=())


def _is_of_reduction(op: Operation) -> bool:
    """Whether an op reduces gradients, casts them for that, or uses them."""
    late = ("gradient", "optimizer")
    users = {user.phase for result in op.results for user, _ in result.uses}
    return op.phase in late or (op.has(Recasts) and bool(users) and users <= {*late})
