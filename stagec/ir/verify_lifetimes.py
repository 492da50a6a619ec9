"""Checks of the ends of lifetimes: nothing uses a value after the op that frees it."""

from collections.abc import Mapping

from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import Module
from stagec.ir.traits import EndsLifetime
from stagec.support.diagnostics import DiagnosticList, note


def check_lifetimes(module: Module, problems: DiagnosticList) -> None:
    """Append errors for operands of functions that an earlier op has freed, in the same region or
    in one around it. A schedule orders actions, which are regions of their own."""
    for func in module.functions:
        _check(func.body, {}, problems)


def _check(region: Region, outside: Mapping[Value, Operation], problems: DiagnosticList) -> None:
    freed = dict(outside)
    for op in region.ops:
        for place, value in enumerate(op.operands):
            twice = op.has(EndsLifetime) and value in op.operands[:place]
            if value in freed or twice:
                problems.error(
                    f"'{op.name}' uses %{value.name}, which is freed already",
                    op.loc,
                    remedy="free it once, after its last user",
                    notes=[] if twice else [note("it is freed here", freed[value].loc)],
                )
        if op.has(EndsLifetime):
            freed.update(dict.fromkeys(op.operands, op))
        if op.region is not None:
            _check(op.region, freed, problems)
