"""Properties of the factors of an index rule, from the types of the operands of an op: sizes,
loads, and routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, product, same
from stagec.ir.rule import Group, Rule, Shape, shape_text
from stagec.ir.types import Dim, Load, Routed, TensorType
from stagec.support.diagnostics import note
from stagec.support.source import Loc


def factor_sizes(op: Operation, rule: Rule, *, local: bool = False) -> dict[str, Expr]:
    """The global (or local) size of each factor from the operand types.

    Raises `DiagnosticError` if ranks or sizes of the operands disagree with the rule.
    """
    first: dict[str, tuple[Expr, Loc, str]] = {}
    compound: list[tuple[tuple[str, ...], Expr, Value]] = []
    if len(op.operands) != len(rule.operands):
        raise op.error(
            f"'{op.name}' expects {len(rule.operands)} operands, found {len(op.operands)}"
        )
    for value, shape in zip(op.operands, rule.operands, strict=True):
        type_ = value.tensor
        if len(type_.dims) != len(shape):
            raise op.error(
                f"'{op.name}' expects %{value.name} to have {len(shape)} dimensions "
                f"({shape_text(shape) or 'a scalar'}), found {len(type_.dims)}: {type_}",
                remedy="give an operand of that rank, or change the rule",
                notes=[note(f"%{value.name} is defined here", value.loc)],
            )
        for size, group in zip(type_.local_shape if local else type_.shape, shape, strict=True):
            factor = group[0]
            if len(group) > 1:
                compound.append((group, size, value))
            elif local and factor in rule.gathered:
                continue  # the op gathers this dimension; its size is that of the result
            elif factor not in first:
                first[factor] = (size, value.loc, value.name)
            else:
                _agree(op, factor, first[factor], size, value, local)
    sizes = {f: s for f, (s, _, _) in first.items()} | dict(rule.sizes)
    for group, size, value in compound:
        _solve(op, sizes, group, size, value)
    if local:
        _sizes_from_results(op, rule, sizes)
    return sizes


def integral_factors(op: Operation) -> dict[str, Expr]:
    """The sizes of factors that must be integers by the definition of the op. Raises like
    `factor_sizes`."""
    rule = op.definition.rule(op) if op.definition.integral else None
    sizes = factor_sizes(op, rule) if rule is not None else {}
    return {factor: sizes[factor] for factor in op.definition.integral if factor in sizes}


def operand_dims(op: Operation, rule: Rule) -> Iterator[tuple[Group, Dim, Value]]:
    """The dimensions of all operands, each with its factors and the operand."""
    for value, shape in zip(op.operands, rule.operands, strict=True):
        for group, d in zip(shape, value.tensor.dims, strict=True):
            yield group, d, value


def factor_loads(op: Operation, rule: Rule) -> dict[str, Load]:
    """The loads of factors, from the rule and the operand types.

    In a dimension of several factors, the load belongs to those that no operand has without a load.
    Raises `DiagnosticError` if one operand has a factor with a load and another one without.
    """
    dims = list(operand_dims(op, rule))
    even = {group[0]: value for group, d, value in dims if len(group) == 1 and d.load is None}
    loads = dict(rule.loads)
    for group, d, value in dims:
        if d.load is None:
            continue
        if len(group) == 1 and group[0] in even:
            raise op.error(
                f"'{op.name}' expects the same load for factor '{group[0]}': %{value.name} has "
                f"{value.type}, %{even[group[0]].name} has {even[group[0]].type}",
                remedy="give both operands the clause load(...), or neither",
            )
        loads |= {f: d.load for f in group if f not in even}
    return loads


def factor_routed(op: Operation, rule: Rule) -> dict[str, Routed]:
    """The factors whose rows a router distributes, from the rule and the operand types. In a
    dimension of several factors, these are the ones that no operand has as a dimension that is not
    routed."""
    dims = [(group, d.routed) for group, d, _ in operand_dims(op, rule)]
    plain = {group[0] for group, routed in dims if len(group) == 1 and routed is None}
    routes = dict(rule.routed)
    for group, routed in dims:
        if routed is not None:
            routes |= {f: routed for f in group if f not in plain}
    return routes


def result_dims(
    op: Operation,
    shape: Shape,
    sizes: Mapping[str, Expr],
    loads: Mapping[str, Load],
    routed: Mapping[str, Routed],
) -> tuple[Dim, ...]:
    """The dimensions of a result. Raises `DiagnosticError` if two dimensions have the same load."""
    dims = [
        Dim(
            product(sizes[f] for f in g),
            load=next((loads[f] for f in g if f in loads), None),
            routed=next((routed[f] for f in g if f in routed), None),
        )
        for g in shape
    ]
    loaded = [d.load for d in dims if d.load is not None]
    if len(set(loaded)) < len(loaded):
        raise op.error(
            f"'{op.name}' splits a dimension with a different number of rows on each rank",
            remedy="keep it whole, or leave out stg.expert_load",
        )
    return tuple(dims)


def _sizes_from_results(op: Operation, rule: Rule, sizes: dict[str, Expr]) -> None:
    for value, shape in zip(op.results, rule.results, strict=False):
        if not isinstance(value.type, TensorType):
            continue
        for size, group in zip(value.type.local_shape, shape, strict=False):
            if len(group) == 1 and (group[0] not in sizes or group[0] in rule.sizes):
                sizes[group[0]] = size


def _agree(
    op: Operation, factor: str, known: tuple[Expr, Loc, str], size: Expr, value: Value, local: bool
) -> None:
    if same(known[0], size):
        return
    kind = "local size" if local else "size"
    raise op.error(
        f"'{op.name}' expects the same {kind} for factor '{factor}': %{known[2]} has {known[0]}, "
        f"%{value.name} has {size}",
        remedy=f"make both {known[0]}, or use another letter",
        notes=[
            note(f"%{known[2]} is defined here", known[1]),
            note(f"%{value.name} is defined here", value.loc),
        ],
    )


def _solve(
    op: Operation, sizes: dict[str, Expr], group: tuple[str, ...], size: Expr, value: Value
) -> None:
    unknown = [f for f in group if f not in sizes]
    for factor in group:
        if factor in sizes and (stated := sizes[factor].value) is not None and stated < 1:
            raise op.error(
                f"'{op.name}' gives factor '{factor}' the size {stated}, expected at least 1",
                remedy="give it a size that divides the dimension",
            )
    known = product(sizes[f] for f in group if f in sizes)
    if len(unknown) > 1:
        raise op.error(
            f"'{op.name}' cannot infer the sizes of factors {', '.join(unknown)}, which share a "
            f"dimension of %{value.name}",
            remedy="use all but one of these factors in another operand",
        )
    if unknown:
        sizes[unknown[0]] = size / known
    elif size != known and not same(size, known):
        raise op.error(
            f"'{op.name}' expects a dimension of %{value.name} to be {known}, found {size}"
        )
