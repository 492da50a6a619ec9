"""Placement of single ops that passes build after propagation, and checks for implicit
movements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from stagec.ir.core import Operation
from stagec.ir.factor_sizes import factor_sizes, operand_dims
from stagec.ir.facts import Facts
from stagec.ir.rewrite import carried
from stagec.ir.types import Partial, TensorType, Type
from stagec.sharding.assignment import (
    accepted_splits,
    distribute,
    handed_on,
    read_assignment,
    required_splits,
    unreduced,
    untrue_parts,
)


def place_from_operands(op: Operation, facts: Facts) -> None:
    """Place the results of an op by the placements of its operands."""
    rule = op.definition.rule(op)
    if rule is None:
        op.infer()
        return
    sizes = factor_sizes(op, rule)
    places: dict[str, tuple[str, ...]] = {}
    for group, d, _ in operand_dims(op, rule):
        if d.axes:
            for factor, axes in distribute(group, d.axes, sizes, facts).items():
                places.setdefault(factor, axes)
    for factor in rule.gathered & places.keys():
        free = set(places[factor]) - {a for f, axes in places.items() if f != factor for a in axes}
        places[factor] = tuple(takewhile(free.__contains__, places[factor]))
    for i, value in enumerate(op.results):
        axes = unreduced(op, rule, i, places)
        partial = Partial(rule.reduction, axes) if axes else None
        value.type = value.tensor.with_splits(required_splits(rule.results[i], places), partial)


def implicit_moves(op: Operation, facts: Facts, deferred: tuple[str, ...] = ()) -> Iterator[str]:
    """Messages for operands that have another placement than the op needs."""
    if op.region is not None:
        yield from _bound_otherwise(op)
    rule = op.definition.rule(op)
    typed = all(isinstance(v.type, TensorType) for v in op.operands)
    if rule is None or not rule.operands or not typed:
        return
    assignment = read_assignment(op, rule, factor_sizes(op, rule), facts, deferred)
    alone = handed_on(op, rule, deferred)
    for i, (value, shape) in enumerate(zip(op.operands, rule.operands, strict=True)):
        splits = list(accepted_splits(value.tensor, shape, rule, assignment))
        linear = i in rule.linear and op.results
        passed = op.results[0].tensor.partial_axes if linear else alone.get(i, ())
        if [d.axes for d in value.tensor.dims] != splits:
            wanted = value.tensor.with_splits(splits)
            yield f"needs %{value.name} as {wanted}, but it is {value.type}"
        elif not set(value.tensor.partial_axes) <= set(passed):
            yield f"takes %{value.name} unreduced: {value.type}"
    yield from untrue_parts(op, rule, assignment, deferred)


def _bound_otherwise(op: Operation) -> Iterator[str]:
    """Messages for region arguments that have another placement than their bound values."""
    types = op.definition.region_args(op)
    if types is None:
        return
    for arg, bound in zip(op.body.args, types, strict=True):
        if not _placed_alike(arg.type, bound):
            yield f"binds %{arg.name}: {arg.type} to a value that is {bound}"
    for arg, value in zip(op.body.args[: carried(op)], op.body.terminator.operands, strict=False):
        if not _placed_alike(arg.type, value.type):
            yield f"carries %{arg.name} as {arg.type}, but yields %{value.name} as {value.type}"


def _placed_alike(a: Type | None, b: Type | None) -> bool:
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return True
    return [d.axes for d in a.dims] == [d.axes for d in b.dims] and a.partial == b.partial
