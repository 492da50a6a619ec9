"""Rewrites that keep the meaning: dead code, common subexpressions, folds of single ops.

Pure functions on a module; the passes of the same names are handles over them.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.layers import stack_of
from stagec.ir.module import Module
from stagec.ir.traits import (
    Accumulates,
    Chooses,
    EndsLifetime,
    Fusible,
    Lowered,
    Recasts,
    Repeats,
    Stays,
    View,
)
from stagec.ir.types import TensorType

_Key = tuple[str, tuple[Value, ...], tuple[tuple[str, Attr], ...], str, tuple[object, ...]]


def is_removable(op: Operation) -> bool:
    """Whether the operation only computes its results.

    | operation                          | removable |
    |------------------------------------|-----------|
    | `stg.add`, `stg.all_gather`        | yes       |
    | `stg.gradient`, `stg.return`       | no        |
    | `stg.adamw`: updates its operands  | no        |
    | a reduction over pipeline stages   | no        |
    | an operation with a region         | no        |
    """
    meets = op.flag("stages")  # other pipeline stages wait for this one
    return not op.has(Stays) and op.region is None and not meets


def enclosing(op: Operation, region: Region) -> Operation:
    """The operation of a region itself that is this one, or has it inside."""
    while op.parent is not None and op.parent is not region:
        op = op.parent.owner
    return op


def stacked_outside(values: Iterable[Value]) -> list[Value]:
    """Values as they are outside of all repeats around them: those hand them on as stacks, in
    place."""
    return [_stacked_outside(value) for value in values]


def _stacked_outside(value: Value) -> Value:
    owner = value.region.owner
    if not owner.has(Repeats):
        return value
    owner.body.terminator.add_operand(value)
    stack = value.tensor.stacked(owner.expr("count"))
    return _stacked_outside(owner.add_result(f"{value.name}_kept", stack, value.loc))


# -- dead code -------------------------------------------------------------------------------------


def eliminate_dead_code(module: Module) -> int:
    """Erase operations whose results nobody uses, in all functions; returns how many.

    A region op loses what it stacks and what it slices for nobody, and goes if it computes only
    what goes.
    """
    return sum(erase_unused(func.body) for func in module.functions)


def erase_unused(region: Region) -> int:
    """Erase dead code of a region; returns how many operations went."""
    erased = 0
    for op in reversed(list(region.ops)):
        if op.region is not None:
            drop_unused_results(op)
            erased += erase_unused(op.region)
            drop_unused_bindings(op)
        if op.results and not _is_used(op) and (is_removable(op) or _computes_only(op)):
            op.erase()
            erased += 1
    return erased


def _is_used(op: Operation) -> bool:
    """Whether something uses a result; of layers of a stack, one of any of its kinds outside of
    the stack, since the others take over what a kind passes on."""
    members = stack_of(op).members
    users = (user for member in members for v in member.results for user, _ in v.uses)
    return any(len(members) == 1 or user not in members for user in users)


def _computes_only(op: Operation) -> bool:
    """Whether an operation with a region does nothing but compute its results."""
    if op.region is None or op.has(Lowered):
        return False
    *body, _ = op.region.ops
    return all(is_removable(inner) or _computes_only(inner) for inner in body)


def carried(op: Operation) -> int:
    """How many operands of a region op are carried (0 for those that carry nothing)."""
    return op.integer("carry", 1) if op.has(Repeats) else 0


def is_chosen_by(value: Value) -> bool:
    """Whether an op chooses by a value, by a view of it, or by it and a bias."""
    users = [user for user, _ in value.uses]
    return any(
        user.has(Chooses) or (_has_each_of(user, value) and any(map(is_chosen_by, user.results)))
        for user in users
    )


def _has_each_of(op: Operation, value: Value) -> bool:
    """Whether the elements of an op's result are those of a value, each by itself, but for a
    smaller operand such as a bias."""
    if op.has(View):
        return True
    fusible = op.definition.trait(Fusible)
    alone = fusible is not None and not fusible.rows
    return alone and all(v is value or v.tensor.rank < value.tensor.rank for v in op.operands)


def uses_inside(value: Value) -> list[tuple[Operation, int, int]]:
    """The operations that use a value of a function, its slices in repeats, or its parts in
    microbatches: each with the number of the operand that it is, and that of the repeats that slice
    it."""
    uses: list[tuple[Operation, int, int]] = []
    for op, index in value.uses:
        if op.has(Repeats) and index >= carried(op):
            uses += [(o, i, depth + 1) for o, i, depth in uses_inside(op.body.args[index])]
        elif op.has(Accumulates):
            uses += uses_inside(op.body.args[index])
        else:
            uses.append((op, index, 0))
    return uses


def uses_of_weight(param: Value) -> list[tuple[Operation, int, int]]:
    """What uses a parameter, a cast of it, or what is left of it without its padding, as
    `uses_inside`."""
    uses: list[tuple[Operation, int, int]] = []
    for op, index, depth in uses_inside(param):
        same = (op.has(Recasts) or op.flag("again")) and len(op.operands) == 1
        if same and op.result.tensor.rank == op.operands[0].tensor.rank:
            uses += [(o, i, d + depth) for o, i, d in uses_of_weight(op.result)]
        else:
            uses.append((op, index, depth))
    return uses


def slice_into(repeat: Operation, value: Value) -> Value:
    """A slice in a repeat of a value that is stacked over its layers."""
    repeat.add_operand(value)
    return repeat.body.add_arg(f"{value.name}_i", value.tensor.inner.sliced(), value.loc)


def drop_unused_results(op: Operation) -> None:
    """Remove results that nobody uses, and what is yielded for them; carried ones stay."""
    end = op.body.terminator
    for index in reversed(range(carried(op), len(op.results))):
        if not op.results[index].uses and len(op.results) == len(end.operands):
            del op.results[index]
            end.set_operands([v for i, v in enumerate(end.operands) if i != index])
    for index, value in enumerate(op.results):
        value.index = index


def drop_unused_bindings(op: Operation) -> None:
    """Remove arguments of the region that nobody uses, and their operands; carried ones stay."""
    region = op.body
    for index in reversed(range(carried(op), len(region.args))):
        if not region.args[index].uses and len(region.args) > 1:
            del region.args[index]
            op.set_operands([v for i, v in enumerate(op.operands) if i != index])
    for index, arg in enumerate(region.args):
        arg.index = index


# -- common subexpressions -------------------------------------------------------------------------


def eliminate_common_subexpressions(module: Module) -> int:
    """Use one result for operations that compute the same; returns how many went.

    Two are the same if name, operands, parameters and result types are, and if both belong to the
    same phase of the step: what backward recomputes or gathers again on purpose stays.
    """
    return sum(_common_in(func.body, {}) for func in module.functions)


def _common_in(region: Region, outer: dict[_Key, Operation]) -> int:
    known, erased = dict(outer), 0
    for op in list(region.ops):
        if op.region is not None:
            visible = {key: o for key, o in known.items() if key[1]}
            erased += _common_in(op.region, visible)
        if not is_removable(op):
            continue
        first = known.setdefault(_key(op), op)
        if first is not op:
            replace_op(op, first.results)
            erased += 1
    return erased


def _key(op: Operation) -> _Key:
    attrs = tuple(
        sorted(((k, v) for k, v in op.attrs.items() if k != "phase"), key=lambda kv: kv[0])
    )
    return op.name, op.operands, attrs, op.phase, tuple(v.type for v in op.results)


def replace_op(op: Operation, values: Iterable[Value]) -> None:
    """Use these values instead of the results of an op, and erase it.

    Their buffers live on: the end of a lifetime that is marked for them goes, that of the result
    takes its place.
    """
    for old, new in zip(op.results, values, strict=True):
        for user, _ in list(new.uses):
            if user.has(EndsLifetime):
                user.set_operands(v for v in user.operands if v is not new)
                if not user.operands:
                    user.erase()
        old.replace_with(new)
    op.erase()


# -- folds -----------------------------------------------------------------------------------------


def canonicalize(module: Module) -> int:
    """Apply the folds of op definitions, in all functions; returns how many operations went.

    A fold replaces the result of an op by a value of the same type that is there already.
    """
    return sum(_fold_region(func.body) for func in module.functions)


def _fold_region(region: Region) -> int:
    erased = 0
    for op in list(region.ops):
        if op.region is not None:
            erased += _fold_region(op.region)
        value = op.definition.fold(op) if len(op.results) == 1 else None
        if value is not None and same_type(value, op.result):
            replace_op(op, [value])
            erased += 1
    return erased


def same_type(left: Value, right: Value) -> bool:
    """Whether two values have the same type but for their role (a parameter may stand anywhere)."""
    a, b = left.type, right.type
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return a == b
    return bool(_BUT_ROLE(a) == _BUT_ROLE(b))


_BUT_ROLE = attrgetter("dtype", "dims", "partial", "placed", "memory", "share", "stage")
