"""Where operations may stand: declarations in the module, computations in functions."""

from __future__ import annotations

from stagec.ir.core import Operation, Region
from stagec.ir.module import Module
from stagec.ir.opdef import UnregisteredOp
from stagec.ir.types import index_name
from stagec.support.diagnostics import DiagnosticList, note
from stagec.support.source import Loc

#: Ops that stand directly in the module, and nowhere else.
TOP_LEVEL = frozenset(
    {"stg.symbols", "stg.assume", "stg.mesh", "stg.func", "stg.strategy", "et.graph"}
)
#: Ops whose region holds statements and has no end.
CONTAINERS = frozenset({"stg.module", "stg.strategy", "stg.arena"})


def check_structure(module: Module, problems: DiagnosticList) -> frozenset[Operation]:
    """Append every operation that stands where it may not, and names that are declared twice.

    Returns the owners of the regions in which something is wrong.
    """
    _check_names(module, problems)
    for op in module.root.body.ops:
        if op.name not in TOP_LEVEL and (op.results or _is_end(op) or op.name == "stg.module"):
            problems.error(
                f"'{op.name}' must not stand directly in the module",
                op.loc,
                remedy="put it into a stg.func",
            )
    disordered: set[Operation] = set()
    for op in (module.root, *module.walk()):
        found = DiagnosticList()
        if op.region is not None:
            _check_region(op, op.region, found)
        if found.items:
            disordered.add(op)
            problems.add(*found.items)
    return frozenset(disordered)


def _is_end(op: Operation) -> bool:
    return op.name.partition(".")[2] in ("yield", "return")


def _check_region(owner: Operation, region: Region, problems: DiagnosticList) -> None:
    container = owner.name in CONTAINERS
    if not container and not isinstance(owner.definition, UnregisteredOp):
        _check_end(owner, region, problems)
    for op in region.ops:
        if op.name in TOP_LEVEL and owner.name != "stg.module":
            problems.error(
                f"'{op.name}' stands inside '{owner.name}'",
                op.loc,
                remedy="put it directly into the module",
            )
        elif not _same_level(owner, op):
            problems.error(
                f"'{op.name}' stands inside '{owner.name}'",
                op.loc,
                remedy="a graph holds the ops of nodes (et.) and nothing else",
            )
        elif (owner.name == "stg.arena") != (op.name == "stg.buffer"):
            problems.error(
                f"'{op.name}' stands inside '{owner.name}'",
                op.loc,
                remedy="an stg.arena holds each stg.buffer, and nothing else",
            )
        elif owner.name == "stg.strategy" and (op.results or _is_end(op)):
            problems.error(
                f"'{op.name}' is no statement of a strategy",
                op.loc,
                remedy="a strategy holds statements such as stg.split[B, over = dp]",
            )


def _same_level(owner: Operation, op: Operation) -> bool:
    """Whether both compute with values, or both are of a lowered graph."""
    if owner.name == "stg.module":
        return True
    lowered = op.name.startswith("et.") and not isinstance(op.definition, UnregisteredOp)
    return lowered == owner.name.startswith("et.")


def _check_end(owner: Operation, region: Region, problems: DiagnosticList) -> None:
    if not region.ops or not _is_end(region.ops[-1]):
        problems.error(
            f"the region of '{owner.name}' does not end in a yield or return",
            region.ops[-1].loc if region.ops else owner.loc,
            remedy="add 'stg.yield(...)' or 'stg.return(...)' as its last operation",
        )
        return
    for op in region.ops[:-1]:
        if _is_end(op):
            problems.error(
                f"'{op.name}' must be the last operation of its region",
                op.loc,
                remedy="remove what follows, or move it to the end",
            )
    expected, found = len(region.returns), len(region.ops[-1].operands)
    if region.returns and expected != found:
        problems.error(
            f"'{owner.name}' declares {expected} results, but {found} are returned",
            region.ops[-1].loc,
            remedy="return as many values as are declared after '->'",
        )


# -- names -----------------------------------------------------------------------------------------


def _check_names(module: Module, problems: DiagnosticList) -> None:
    seen: dict[str, Loc] = {}
    for op in module.root.body.ops:
        if op.name in ("stg.symbols", "stg.mesh"):
            for name in op.attrs:
                _claim(name, f"'{name}' is declared twice", op, seen, problems)
        if op.name == "stg.mesh":
            _claim("stg.mesh", "the module has two meshes", op, seen, problems)
        if op.symbol:
            _claim(f"@{op.symbol}", f"@{op.symbol} is defined twice", op, seen, problems)
    _check_reserved(module, problems)


def _check_reserved(module: Module, problems: DiagnosticList) -> None:
    """Symbols that lowered sizes contain are not those of the text."""
    axes = module.mesh.axes if module.mesh else ()
    reserved = {index_name(a): f"the coordinate of a rank along axis '{a}'" for a in axes}
    reserved |= {n: f"the load of {load.of}" for load in module.loads for n in load.names}
    for op in module.ops("stg.symbols"):
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
