"""Where the gathered parameters of a region are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.api import Builder, Module, Operation, Region, Value
from stagec.ir.traits import Recasts
from stagec.ir_spec.ops.layout import Discard


def reshard_behind(module: Module, region: Region, values: Sequence[Value]) -> None:
    """Drop values when the last forward or backward of their region has run; what stays until the
    step ends (`stg.stage_buffers[results = step]`) is no part of it."""
    ops = region.ops[:-1]
    updates = next((i for i, op in enumerate(ops) if op.phase == "optimizer"), len(ops))
    behind = [op for op in ops[updates:] if isinstance(op.definition, Discard)]
    ran = [op for op in ops if not _is_of_reduction(op) and op not in behind]
    if values and ran:
        phase = next((op.phase for op in reversed(ran) if op.phase != "recompute"), ran[-1].phase)
        after = Builder.after(module.registry, ran[-1], loc=values[0].loc, phase=phase)
        after.op("stg.reshard", values, types=())


def _is_of_reduction(op: Operation) -> bool:
    """Whether an op reduces gradients, casts them for that, or uses them."""
    late = ("gradient", "optimizer")
    users = {user.phase for result in op.results for user, _ in result.uses}
    return op.phase in late or (op.has(Recasts) and bool(users) and users <= {*late})
