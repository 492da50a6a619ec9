"""Rewrites that preserve the meaning: dead code, common subexpressions, folds of single ops; and
the repeats, slices and uses that rewrites look at.

The passes of the same names call these functions, which change a module in place.
"""

from collections.abc import Iterable
from operator import attrgetter, itemgetter

from stagec.ir.core import Attr, Operation, Region, Value, renumber
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
from stagec.support.source import Loc

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
    """The operation directly in a region that is or contains this one."""
    while op.parent is not None and op.parent is not region:
        op = op.parent.owner
    return op


def stacked_outside(values: Iterable[Value]) -> list[Value]:
    """The values outside of all repeats around them, which return them as stacks, in place."""
    return [_stacked_outside(value) for value in values]


def _stacked_outside(value: Value) -> Value:
    owner = value.region.owner
    if not owner.has(Repeats):
        return value
    return _stacked_outside(stacked(owner, value, f"{value.name}_kept"))


def stacked(repeat: Operation, value: Value, name: str, loc: Loc | None = None) -> Value:
    """The stack of a value in a repeat over its iterations, as a new result of this name."""
    repeat.body.terminator.add_operand(value)
    type_ = value.tensor.stacked(repeat.expr("count"))
    return repeat.add_result(name, type_, loc or value.loc)


def bind(repeat: Operation, outer: Value, like: Value) -> Value:
    """Bind a value to a repeat. Returns its argument, with the name and the type of `like`."""
    repeat.add_operand(outer)
    return repeat.body.add_arg(like.name, like.tensor, like.loc)


# -- dead code -------------------------------------------------------------------------------------


def eliminate_dead_code(module: Module) -> int:
    """Erase operations with unused results in all functions. Returns their number.

    An op with a region loses unused stacks and slices, and is erased if all of its results are
    unused and its region has no other effect.
    """
    return sum(erase_unused(func.body) for func in module.functions)


def erase_unused(region: Region) -> int:
    """Erase dead code of a region. Returns the number of erased operations."""
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
    """Whether a result is used. For a stack of several kinds of layers, a use of any member outside
    of the stack counts, since members pass values to each other."""
    members = stack_of(op).members if "order" in op.attrs else (op,)
    if len(members) == 1:
        return any(v.uses for v in op.results)
    users = (user for member in members for v in member.results for user, _ in v.uses)
    return any(user not in members for user in users)


def _computes_only(op: Operation) -> bool:
    """Whether an operation with a region only computes its results."""
    if op.region is None or op.has(Lowered):
        return False
    *body, _ = op.region.ops
    return all(is_removable(inner) or _computes_only(inner) for inner in body)


def repeats_in(region: Region, phase: str = "") -> list[Operation]:
    """The repeats directly in a region, in order; with `phase` those of that phase."""
    repeats = (op for op in region.ops if op.has(Repeats))
    return [op for op in repeats if phase in ("", op.phase)]


def carried(op: Operation) -> int:
    """The number of carried operands of a repeat; 0 for other operations."""
    return op.integer("carry", 1) if op.has(Repeats) else 0


def is_chosen_by(value: Value) -> bool:
    """Whether an op (such as a router) chooses by a value, by a view of it, or by it with a
    bias."""
    users = [user for user, _ in value.uses]
    return any(
        user.has(Chooses) or (_has_each_of(user, value) and any(map(is_chosen_by, user.results)))
        for user in users
    )


def _has_each_of(op: Operation, value: Value) -> bool:
    """Whether an op is a view of a value, or elementwise with further operands of lower rank only,
    such as a bias."""
    if op.has(View):
        return True
    fusible = op.definition.trait(Fusible)
    alone = fusible is not None and not fusible.rows
    return alone and all(v is value or v.tensor.rank < value.tensor.rank for v in op.operands)


def uses_inside(value: Value) -> list[tuple[Operation, int, int]]:
    """The operations that use a value of a function, its slices in repeats, or its parts in
    microbatches, each with the operand index and the number of repeats that slice the value."""
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
    """The users of a parameter, of a cast of it, or of its view without padding, in the form of
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
    """Bind a value that is stacked over layers to a repeat. Returns the slice in the repeat."""
    repeat.add_operand(value)
    return repeat.body.add_arg(f"{value.name}_i", value.tensor.inner.sliced(), value.loc)


def drop_unused_results(op: Operation) -> None:
    """Remove unused results of a region op and their yielded values, except carried ones."""
    end = op.body.terminator
    for index in reversed(range(carried(op), len(op.results))):
        if not op.results[index].uses and len(op.results) == len(end.operands):
            del op.results[index]
            end.set_operands([v for i, v in enumerate(end.operands) if i != index])
    renumber(op.results)


def drop_unused_bindings(op: Operation) -> None:
    """Remove unused arguments of the region and their operands, except carried ones."""
    region = op.body
    for index in reversed(range(carried(op), len(region.args))):
        if not region.args[index].uses and len(region.args) > 1:
            del region.args[index]
            op.set_operands([v for i, v in enumerate(op.operands) if i != index])
    renumber(region.args)


# -- common subexpressions -------------------------------------------------------------------------


def eliminate_common_subexpressions(module: Module) -> int:
    """Use one result for operations that compute the same. Returns the number of erased operations.

    Operations are equal if name, operands, parameters, result types and phase are. Values that
    backward recomputes or gathers again on purpose are in another phase.
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
    attrs = sorted(((k, v) for k, v in op.attrs.items() if k != "phase"), key=itemgetter(0))
    return op.name, op.operands, tuple(attrs), op.phase, tuple(v.type for v in op.results)


def replace_op(op: Operation, values: Iterable[Value]) -> None:
    """Replace the results of an op by these values, and erase it.

    The buffers of the values live longer: their `stg.free` is removed, and that of the result takes
    its place.
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
    """Apply the folds of op definitions in all functions. Returns the number of erased operations.

    A fold replaces the result of an op by an existing value of the same type.
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
    """Whether two values have the same type except for role and chunk."""
    a, b = left.type, right.type
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return a == b
    return bool(_BUT_ROLE(a) == _BUT_ROLE(b))


_BUT_ROLE = attrgetter("dtype", "dims", "partial", "placed", "memory", "share", "stage")
