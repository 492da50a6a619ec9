"""Replaces symbols and mesh axes by their values throughout a module."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from stagec.ir.core import Attr, Operation, Value, substitute_attr
from stagec.ir.expr import Expr, const
from stagec.ir.facts import Relation
from stagec.ir.module import Module
from stagec.ir.param import AXES, DIMS
from stagec.ir.rewrite import replace_op
from stagec.ir.types import Partial, TensorType, Type
from stagec.ir.verify import broken
from stagec.support.diagnostics import DiagnosticList
from stagec.support.suggest import did_you_mean

TypeMap = Callable[[TensorType], TensorType]


def bind(module: Module, values: Mapping[str, int]) -> None:
    """Substitute symbols and axes by numbers in all types and parameters, in place.

    The declarations keep the names with their values. A symbol to which an op refers by name (the
    batch that is cut into microbatches, a dimension in a strategy) gets its value but stays in the
    types. Axes of size 1 are removed. Raises `DiagnosticError` for unknown names, values below 1
    and assumptions that do not hold.
    """
    check_names(module, values)
    _check_assumptions(module, {**module.env, **values})
    for op in module.declaring("symbols", "axes"):
        op.attrs.update({name: const(values[name]) for name in op.attrs if name in values})
    kept = _referred_to(module) - frozenset(module.mesh.axes if module.mesh else ())
    try:
        substitute_sizes(module, {n: const(v) for n, v in values.items() if n not in kept})
    except ZeroDivisionError as e:
        raise module.root.error(f"cannot bind: {e}", remedy="bind other values") from None
    gone = drop_unit_axes(module)
    for op in module.declaring("axes"):
        for axis in gone:
            op.attrs.pop(axis, None)


def check_names(module: Module, values: Mapping[str, int]) -> None:
    """Raises `DiagnosticError` for names that a module does not declare, and for values that are
    not positive integers."""
    problems = DiagnosticList()
    mesh = module.mesh
    known = {*module.symbols, *(mesh.axes if mesh else ())}
    for name, value in values.items():
        if name not in known:
            problems.error(
                f"cannot bind '{name}': it is neither a symbol nor a mesh axis",
                module.root.loc,
                remedy=did_you_mean(name, known) or f"the names are: {', '.join(sorted(known))}",
            )
        if not str(value).isdecimal() or value < 1:  # the API accepts any number
            problems.error(
                f"cannot bind '{name}' to {value}: sizes are positive whole numbers",
                remedy="use 1 or more",
            )
    problems.check()


def _check_assumptions(module: Module, env: dict[str, int]) -> None:
    problems = DiagnosticList()
    for relation, op in module.relations:
        problem = broken(relation, env) if relation.symbols <= env.keys() else None
        if problem:
            problems.error(problem, op.loc, remedy="bind other values")
    problems.check()


def _referred_to(module: Module) -> frozenset[str]:
    """The names of symbols to which parameters of ops refer by name."""
    names: set[str] = set()
    for op in module.walk():
        for param in op.definition.params:
            if param.kind in DIMS:
                names.update(op.names(param.name) if param.name in op.attrs else (param.default,))
    return frozenset(names)


def substitute_sizes(module: Module, env: Mapping[str, Expr]) -> None:
    """Replace symbols in all types and parameters except their declarations, in place."""
    for op in _operations(module):
        if op.definition.declares not in ("symbols", "axes"):
            op.attrs = {name: substitute_attr(value, env) for name, value in op.attrs.items()}
    for op in module.declaring("relations"):
        _drop_settled(op)
    map_types(module, lambda t: t.substitute(env))


def _drop_settled(op: Operation) -> None:
    relations = op.attrs.get("relations", ())
    given = relations if isinstance(relations, tuple) else ()
    op.attrs["relations"] = left = tuple(r for r in given if isinstance(r, Relation) and r.symbols)
    if not left:
        op.erase()


# -- types -----------------------------------------------------------------------------------------


def map_types(module: Module, change: TypeMap) -> None:
    """Replace every tensor type of the module, including those of declared results."""
    for op in _operations(module):
        for value in _values(op):
            value.type = _changed(value.type, change)
        if op.region is not None:
            returns = (_changed(t, change) for t in op.region.returns)
            op.region.returns = tuple(t for t in returns if t is not None)


def _changed(type_: Type | None, change: TypeMap) -> Type | None:
    return change(type_) if isinstance(type_, TensorType) else type_


def _operations(module: Module) -> Iterator[Operation]:
    yield module.root
    yield from module.walk()


def _values(op: Operation) -> Iterator[Value]:
    yield from op.results
    if op.region is not None:
        yield from op.region.args


# -- axes of size 1 --------------------------------------------------------------------------------


def drop_unit_axes(module: Module) -> tuple[str, ...]:
    """Remove mesh axes of size 1 from types, groups and strategies.

    Returns those that are no longer used. A collective whose group becomes empty moves nothing: its
    results are replaced by its operands.
    """
    mesh = module.mesh
    gone = mesh.unit_axes if mesh else frozenset[str]()
    if not gone:
        return ()
    map_types(module, lambda t: without_axes(t, gone))
    left = {axis for op in list(module.walk()) for axis in drop_axes(op, gone)}
    return tuple(sorted(gone - left))


def without_axes(type_: TensorType, gone: Collection[str]) -> TensorType:
    """The type on a mesh without these axes."""
    dims = tuple(d.without(gone) for d in type_.dims)
    axes = tuple(a for a in type_.partial_axes if a not in gone)
    partial = Partial(type_.partial.kind, axes) if type_.partial and axes else None
    stage = None if type_.stage and type_.stage[0] in gone else type_.stage
    return replace(type_, dims=dims, partial=partial, stage=stage)


def drop_axes(op: Operation, gone: Collection[str]) -> frozenset[str]:
    """Remove axes from the parameters of an op. Returns those that had to stay.

    An optional list that becomes empty is removed. An op without effect when its axes are removed
    is erased.
    """
    left: set[str] = set()
    for param in op.definition.params:
        if param.kind not in AXES or param.name not in op.attrs:
            continue
        axes = op.names(param.name)
        rest: tuple[Attr, ...] = tuple(a for a in axes if a not in gone)
        if len(rest) == len(axes):
            continue
        if rest:
            op.attrs[param.name] = rest
        elif not param.required and param.kind == "axes":
            del op.attrs[param.name]
        elif not _erase_idle(op):
            left.update(axes)
        else:
            break
    return frozenset(left)


def _erase_idle(op: Operation) -> bool:
    """Erase an op whose group is empty. Returns whether this was possible."""
    if op.region is not None or len(op.results) != len(op.operands):
        return False
    replace_op(op, op.operands)
    return True
