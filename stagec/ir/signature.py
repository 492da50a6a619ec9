"""Comparison of an operation with the signature of its definition: counts, parameters, name,
region.

It is used both for parsed operations (`stagec.text.build`, which knows the location of each
parameter) and for those that passes make (`stagec.ir.verify`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef, UnregisteredOp
from stagec.ir.param import STATICS, Arity, convert_param
from stagec.ir.traits import HasRegion, Named, OpenParams
from stagec.support.diagnostics import DiagnosticList
from stagec.support.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Misfit:
    """An error of a signature: the message, a remedy, and the parameter concerned, if any."""

    message: str
    remedy: str
    param: str = ""


def check_signature(op: Operation, problems: DiagnosticList) -> bool:
    """Append errors of the signature, at the location of the op. Returns whether there are none."""
    every = misfits(op)
    for misfit in every:
        problems.error(misfit.message, op.loc, remedy=misfit.remedy)
    return not every


def misfits(op: Operation) -> list[Misfit]:
    """All errors of the signature; none for an op without a definition."""
    if isinstance(op.definition, UnregisteredOp):
        return []
    operands = _count(op, op.definition.takes, len(op.operands), "operand")
    results = _count(op, op.definition.gives, len(op.results), "result")
    return [*_params(op), *operands, *results, *_region(op)]


def _count(op: Operation, arity: Arity, count: int, noun: str) -> Iterator[Misfit]:
    if not arity.fits(count):
        names = ", ".join(arity.names) or "none"
        message = f"'{op.name}' expects {arity.text(noun)}, found {count}"
        yield Misfit(message, f"its {noun}s are: {names}")


def _params(op: Operation) -> Iterator[Misfit]:
    """Wrong parameters; missing ones only if none is wrong, since a wrong one may be a misspelt
    missing one."""
    definition, known = op.definition, op.definition.params_by_name
    wrong = False
    for name, value in op.attrs.items():
        param = known.get(name)
        if param is not None:
            try:
                convert_param(param, value)
            except ValueError as e:
                wrong = True
                yield Misfit(str(e), param.doc or parameters_of(definition), name)
        elif not definition.has(OpenParams):
            wrong = True
            remedy = did_you_mean(name, known) or parameters_of(definition)
            yield Misfit(f"'{op.name}' has no parameter '{name}'", remedy, name)
    for param in () if wrong or STATICS in op.attrs else definition.params:
        if param.required and param.name not in op.attrs:
            message = f"'{op.name}' expects parameter '{param.name}': {param.doc}"
            yield Misfit(message, parameters_of(definition))


def parameters_of(definition: OpDef) -> str:
    """A remedy: the parameters of an op."""
    names = ", ".join(p.name for p in definition.params)
    return f"its parameters are: {names}" if names else "it takes no parameters"


def _region(op: Operation) -> Iterator[Misfit]:
    if op.region is not None and not op.has(HasRegion):
        yield Misfit(f"'{op.name}' takes no region", "remove '{ ... }'")
    if op.region is None and op.has(HasRegion):
        yield Misfit(f"'{op.name}' expects a region", "add '{ ... }'")
    if op.has(Named) and not op.symbol:
        yield Misfit(f"'{op.name}' expects a name such as @main", f"write '{op.name} @name'")
