"""The signature of an operation: counts, parameters, regions.

The parser checks it in text, this in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.infer import describe
from stagec.ir.opdef import UnregisteredOp, convert_param
from stagec.support.diagnostics import DiagnosticList


def check_signature(op: Operation, problems: DiagnosticList) -> bool:
    """Append what does not fit the definition; whether all of it fits. Anything fits an op without
    a definition."""
    if isinstance(op.definition, UnregisteredOp):
        return True
    found = [*_operands(op), *_results(op), *_params(op), *_region(op)]
    for message in found:
        problems.error(f"'{op.name}' {message}", op.loc, remedy=describe(op))
    return not found


def _operands(op: Operation) -> Iterator[str]:
    expected, found = len(op.definition.operands), len(op.operands)
    if op.definition.variadic:
        if found < expected - 1:
            yield f"expects at least {expected - 1} operands, found {found}"
    elif found != expected:
        yield f"expects {expected} operands, found {found}"


def _results(op: Operation) -> Iterator[str]:
    definition, found = op.definition, len(op.results)
    if definition.has_region or definition.variadic_results:
        return
    most = len(definition.results)
    least = most if definition.required_results is None else definition.required_results
    if not least <= found <= most:
        yield f"expects {least} to {most} results, found {found}"


def _params(op: Operation) -> Iterator[str]:
    known = op.definition.params_by_name()
    for param in op.definition.params:
        if param.required and param.name not in op.attrs:
            yield f"expects parameter '{param.name}': {param.doc}"
    for name, value in op.attrs.items():
        if name not in known:
            if not op.definition.open_params:
                yield f"has no parameter '{name}'"
            continue
        try:
            convert_param(known[name], value)
        except ValueError as e:
            yield str(e)


def _region(op: Operation) -> Iterator[str]:
    if op.definition.has_region != (op.region is not None):
        yield "expects a region" if op.definition.has_region else "takes no region"
    if op.definition.symbol == "required" and not op.symbol:
        yield "expects a name such as @main"
    if op.region is None or not op.operands:
        return
    if len(op.operands) != len(op.region.args):
        yield f"binds {len(op.operands)} values to {len(op.region.args)} arguments"
