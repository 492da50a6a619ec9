"""Type inference: adds types that the text leaves out, and checks those that it states.

Types are inferred from the operands, op by op; a wrong type is reported at its location.
"""

import sys
from traceback import extract_tb

from stagec.ir.core import NotATensorError, Operation, Region, Value
from stagec.ir.expr import Expr, same
from stagec.ir.module import Module
from stagec.ir.opdef import UnregisteredOp
from stagec.ir.rule import RuleSyntaxError
from stagec.ir.traits import Terminates
from stagec.ir.types import TensorType, Type
from stagec.ir.verified import VerifiedCache
from stagec.support.diagnostics import Diagnostic, DiagnosticError, DiagnosticList, note
from stagec.support.source import FileLoc, Loc, NameLoc

Shape = tuple[Expr, ...]


def infer_module(module: Module) -> None:
    """Give every value a type.

    Raises `DiagnosticError` with all ops whose types do not match.
    """
    problems = DiagnosticList()
    for op in module.root.body.ops:
        if op.flag("private"):
            problems.error(
                f"@{op.symbol} is private, and has not been inlined",
                op.loc,
                remedy="run the pass 'inline' first",
            )
        elif op.region is not None:
            _infer_region(op.region, problems)
    problems.check()


def forget_types(op: Operation) -> None:
    """Drop the types of all results of an op and of values in its region, so that changed sizes are
    inferred again. Placed types are kept, and those of ops without a definition."""
    for inner in op.walk():
        if isinstance(inner.definition, UnregisteredOp):
            continue
        for value in (*inner.results, *(inner.region.args if inner.region is not None else ())):
            if isinstance(value.type, TensorType) and not value.type.placed:
                value.type = None


def infer_again(module: Module) -> None:
    """Infer all types of the main function again, except placed ones, because sizes have changed.
    Raises `DiagnosticError` like `infer_module`."""
    for op in module.main.body.ops:
        forget_types(op)
    infer_module(module)


def _infer_region(
    region: Region, problems: DiagnosticList, verified: VerifiedCache | None = None
) -> None:
    for arg in region.args:
        if arg.type is None:
            problems.error(
                f"argument '%{arg.name}' has no type",
                arg.loc,
                remedy=f"write '%{arg.name}: bf16[...]'",
            )
    for op in region.ops:
        infer_op(op, problems, verified)


def infer_op(
    op: Operation, problems: DiagnosticList, verified: VerifiedCache | None = None
) -> None:
    """Infer the result types of one op (and of its region), and append problems. Existing types are
    compared with the inferred ones, except for ops that are `verified`."""
    if verified is None:
        _infer_op(op, problems, verified)
    elif not verified.knows(op, "inferred"):
        before = len(problems.items)
        _infer_op(op, problems, verified)
        if len(problems.items) == before:
            verified.passed(op, "inferred")


def _infer_op(op: Operation, problems: DiagnosticList, verified: VerifiedCache | None) -> None:
    if any(v.type is None for v in op.operands):
        return  # reported where that value is made
    try:
        if op.region is not None:
            _enter(op, op.region, problems, verified)
            if any(v.type is None for v in (*op.region.args, *op.region.terminator.operands)):
                return  # reported inside
        types = op.definition.infer(op)
    except DiagnosticError as e:
        problems.add(*e.diagnostics)
        return
    except (RuleSyntaxError, NotATensorError, IndexError, KeyError, ValueError) as e:
        problems.add(misfit(op, e))
        return
    if isinstance(op.definition, UnregisteredOp):
        return
    given = op.definition.gives
    least = len(types) if given.most is None else min(given.least, len(types))
    if not least <= len(op.results) <= len(types):
        problems.error(
            f"'{op.name}' has {len(types)} results, found {len(op.results)} names",
            op.loc,
            remedy="write as many names as it has results",
        )
    for value, type_ in zip(op.results, types, strict=False):
        _set(op, value, type_, problems)


def describe(op: Operation) -> str:
    """The general remedy for an op."""
    return f"'stagec ops {op.name}' says what it takes"


def misfit(op: Operation, problem: Exception) -> Diagnostic:
    """The diagnostic for operands with which a definition raises an exception."""
    notes = [note(f"%{v.name} is {v.type}", v.loc) for v in op.operands[:3]]
    notes += _raised(op, problem)
    remedy = describe(op)
    match problem:
        case RuleSyntaxError():
            message = f"'{op.name}' has a malformed rule: {problem}"
            remedy = 'write a rule such as "bsd,dhk->bshk"'
        case NotATensorError():
            message = f"'{op.name}' works on tensors, but %{problem.value.name} is not a tensor"
        case KeyError():
            message = f"'{op.name}' cannot infer the size of factor {problem}: no operand has it"
        case _:
            message = f"'{op.name}' cannot be applied to operands of these shapes"
    return Diagnostic(message, op.loc, "error", remedy, tuple(notes))


def _raised(op: Operation, problem: Exception) -> list[Diagnostic]:
    """A note with the line of a plug-in that raised, for its author; none for built-in ops."""
    module = sys.modules.get(type(op.definition).__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.partition(".")[0] == "stagec":
        return []
    own = [f for f in extract_tb(problem.__traceback__) if f.filename == file]
    text = f"{type(problem).__name__} in {{}} of the op's definition: {problem}"
    return [note(text.format(f.name), FileLoc(file, f.lineno or 1, 1)) for f in own[-1:]]


def _enter(
    op: Operation, region: Region, problems: DiagnosticList, verified: VerifiedCache | None
) -> None:
    types = op.definition.region_args(op)
    if types is not None:
        if len(op.operands) != len(region.args):
            problems.error(
                f"'{op.name}' binds {len(op.operands)} values to {len(region.args)} arguments",
                op.loc,
            )
            return
        for value, type_ in zip(region.args, types, strict=True):
            bare = type_.unplaced() if isinstance(type_, TensorType) else type_
            _set(op, value, type_ if value.type is not None else bare, problems)
    _infer_region(region, problems, verified)
    if not region.ops or not region.ops[-1].has(Terminates):
        problems.error(
            f"the region of '{op.name}' does not end in a yield or return",
            op.loc,
            remedy="add 'stg.yield(...)' as its last operation",
        )
        raise DiagnosticError


def _set(op: Operation, value: Value, inferred: Type, problems: DiagnosticList) -> None:
    if value.type is None:
        value.type = inferred
        return
    declared = value.type
    if not isinstance(declared, TensorType) or not isinstance(inferred, TensorType):
        return
    if declared.dtype != inferred.dtype or not same_shape(declared.shape, inferred.shape):
        problems.error(
            f"'{op.name}' gives %{value.name}: {inferred.unplaced()}, but {stated(value.loc)} "
            f"{declared.unplaced()}",
            value.loc,
            remedy="correct the type, or leave it out",
            notes=[note(f"%{v.name} is {v.type}", v.loc) for v in op.operands[:3]],
        )


def stated(loc: Loc) -> str:
    """The source that states the type of a value at this location: the text, or a called
    function."""
    return f"{loc.name} states" if isinstance(loc, NameLoc) else "it is written as"


def same_shape(a: Shape, b: Shape) -> bool:
    """Whether the sizes are equal for all values of symbols."""
    return a == b or (len(a) == len(b) and all(map(same, a, b)))
