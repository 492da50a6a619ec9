"""Checks of where operations may be: declarations in the module, computations in functions."""

from stagec.ir.core import Operation, Region
from stagec.ir.module import Module
from stagec.ir.opdef import UnregisteredOp
from stagec.ir.traits import Conditional, Holds, Lowered, Terminates
from stagec.ir.types import index_name
from stagec.ir.verified import VerifiedCache
from stagec.support.diagnostics import DiagnosticList, note
from stagec.support.source import Loc


def check_structure(
    module: Module, problems: DiagnosticList, verified: VerifiedCache
) -> frozenset[Operation]:
    """Append operations in invalid places, and names that are declared twice.

    Returns the owners of regions with errors.
    """
    _check_names(module, problems)
    disordered: set[Operation] = set()
    for op in verified.unknown([module.root], "structure", problems):
        if op.region is None:
            continue
        inner = DiagnosticList()
        _check_region(op, op.region, inner)
        if inner.items:
            disordered.add(op)
            problems.add(*inner.items)
    return frozenset(disordered)


def _check_region(owner: Operation, region: Region, problems: DiagnosticList) -> None:
    holds = owner.definition.trait(Holds)
    if holds is None and not isinstance(owner.definition, UnregisteredOp):
        _check_end(owner, region, problems)
    bound = owner.operands and not owner.has(Conditional)
    if bound and len(owner.operands) != len(region.args):
        problems.error(
            f"'{owner.name}' binds {len(owner.operands)} values to {len(region.args)} arguments",
            owner.loc,
            remedy="bind each argument of its region to one value",
        )
    for op in region.ops:
        remedy = _misplaced(owner, holds, op)
        if remedy is not None:
            problems.error(f"'{op.name}' stands inside '{owner.name}'", op.loc, remedy=remedy)


def _misplaced(owner: Operation, holds: Holds | None, op: Operation) -> str | None:
    """A remedy for an operation that may not be in the region of `owner`; None if it may."""
    parents = op.definition.parents
    if parents is not None and owner.name not in parents:
        return f"put it directly into {' or '.join(parents)}" if parents else "it stands in no op"
    if holds is not None:
        fits = parents is not None if holds.only else not op.results and not op.has(Terminates)
        return None if fits else f"'{owner.name}' may contain only {holds.what}"
    same = op.has(Lowered) == owner.has(Lowered)
    if same or isinstance(owner.definition, UnregisteredOp):
        return None
    return "a graph may contain only ops of nodes (et.)"


def _check_end(owner: Operation, region: Region, problems: DiagnosticList) -> None:
    if not region.ops or not region.ops[-1].has(Terminates):
        problems.error(
            f"the region of '{owner.name}' does not end in a yield or return",
            region.ops[-1].loc if region.ops else owner.loc,
            remedy="add 'stg.yield(...)' or 'stg.return(...)' as its last operation",
        )
        return
    for op in region.ops[:-1]:
        if op.has(Terminates):
            problems.error(
                f"'{op.name}' must be the last operation of its region",
                op.loc,
                remedy="remove what follows, or move it to the end",
            )
    expected, actual = len(region.returns), len(region.ops[-1].operands)
    if region.returns and expected != actual:
        problems.error(
            f"'{owner.name}' declares {expected} results, but {actual} are returned",
            region.ops[-1].loc,
            remedy="return as many values as are declared after '->'",
        )


# -- names -----------------------------------------------------------------------------------------


def _check_names(module: Module, problems: DiagnosticList) -> None:
    seen: dict[str, Loc] = {}
    for op in module.root.body.ops:
        if op.definition.declares in ("symbols", "axes"):
            for name in op.attrs:
                _claim(name, f"'{name}' is declared twice", op, seen, problems)
        if op.definition.declares == "axes":
            _claim("@", "the module has two meshes", op, seen, problems)
        if op.symbol:
            _claim(f"@{op.symbol}", f"@{op.symbol} is defined twice", op, seen, problems)
    _check_reserved(module, problems)


def _check_reserved(module: Module, problems: DiagnosticList) -> None:
    """Report declared symbols whose names lowered sizes use."""
    axes = module.mesh.axes if module.mesh else ()
    reserved = {index_name(a): f"the coordinate of a rank along axis '{a}'" for a in axes}
    reserved |= {n: f"the load of {load.of}" for load in module.loads for n in load.names}
    for op in module.declaring("symbols"):
        for name in op.attrs.keys() & reserved.keys():
            problems.error(
                f"'{name}' is {reserved[name]} in lowered programs",
                op.loc,
                remedy="give the symbol another name",
            )


def _claim(
    name: str, message: str, op: Operation, seen: dict[str, Loc], problems: DiagnosticList
) -> None:
    if name in seen:
        first = note("it is declared here first", seen[name])
        problems.error(message, op.loc, remedy="drop one of the two", notes=[first])
    seen.setdefault(name, op.loc)
