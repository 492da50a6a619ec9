"""Assignments of mesh axes to factors of an op: the link between rules and placements.

An assignment maps factors to axes. It determines the placement in which the op needs each operand,
and the placement of each result. It can be recovered from placed results.
"""

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.factor_sizes import operand_dims
from stagec.ir.facts import Facts
from stagec.ir.rule import Group, Rule, Shape
from stagec.ir.types import TensorType, axis_size

Axes = tuple[str, ...]
Assignment = Mapping[str, Axes]


def split_of(group: Group, assignment: Assignment) -> Axes:
    """The axes that split a dimension made of these factors, major first."""
    return tuple(a for f in group for a in assignment.get(f, ()))


def required_splits(shape: Shape, assignment: Assignment) -> tuple[Axes, ...]:
    """The split of each dimension of an operand or result."""
    return tuple(split_of(group, assignment) for group in shape)


def accepted_splits(
    value: TensorType, shape: Shape, rule: Rule, assignment: Assignment
) -> tuple[Axes, ...]:
    """The split of each dimension of an operand that the op accepts: the split that it needs or,
    along a factor that the op gathers itself, a split over further axes."""
    needed = required_splits(shape, assignment)
    busy = {a for axes in needed for a in axes}
    splits: list[Axes] = []
    for group, have, need in zip(shape, value.dims, needed, strict=True):
        further = have.axes[len(need) :] if have.axes[: len(need)] == need else ()
        alone = rule.gathered.issuperset(group) and busy.isdisjoint(further)
        splits.append(have.axes if alone and further else need)
    return tuple(splits)


def distribute(
    group: Group, axes: Axes, sizes: Mapping[str, Expr], facts: Facts
) -> dict[str, Axes]:
    """Distribute the axes of a dimension to its factors, major factor first, as far as they are
    known to divide.

    A factor gets axes only if the one before it is split completely; if this is not known, all axes
    go to the first factor.
    """
    shares: dict[str, Axes] = {}
    rest = axes
    for factor in group:
        size = sizes.get(factor)
        if size is not None and facts.divides(axis_size(rest), size):
            return {**shares, factor: rest}
        count = _completely(size, rest, facts) if size is not None else None
        if count is None:
            break
        shares.update({factor: rest[:count]} if count else {})
        rest = rest[count:]
    return {group[0]: axes}


def _completely(size: Expr, axes: Axes, facts: Facts) -> int | None:
    """The number of leading axes that split a size into parts of one; None if it is not known."""
    for count in range(len(axes) + 1):
        parts = axis_size(axes[:count])
        if facts.divides(parts, size) and facts.divides(size, parts):
            return count
    return None


def handed_on(op: Operation, rule: Rule, deferred: Axes) -> dict[int, Axes]:
    """Deferred axes over which exactly one operand is a partial sum that the op passes on. One that
    is also partial over other axes is reduced over all of them at once."""
    parts = {i: op.operands[i].tensor.partial for i in rule.each}
    sums = {i: p.axes for i, p in parts.items() if p is not None and p.kind == "sum"}
    sums = {i: axes for i, axes in sums.items() if set(deferred).issuperset(axes)}
    counts = [a for axes in sums.values() for a in axes]
    return {i: tuple(a for a in axes if counts.count(a) == 1) for i, axes in sums.items()}


def passing_partial(op: Operation, rule: Rule, deferred: Axes = ()) -> Axes:
    """Axes over which the op may compute on partial sums: those of all linear operands, or deferred
    axes of a single operand."""
    if rule.each:
        alone = handed_on(op, rule, deferred)
        return tuple(a for i in sorted(alone) for a in alone[i])
    parts = [op.operands[i].tensor.partial for i in sorted(rule.linear)]
    if not parts or any(p is None or p.kind != "sum" for p in parts):
        return ()
    first = parts[0].axes if parts[0] else ()
    return tuple(a for a in first if all(p is not None and a in p.axes for p in parts))


def unreduced(
    op: Operation, rule: Rule, index: int, assignment: Assignment, deferred: Axes = ()
) -> Axes:
    """Axes over which a result is partial under an assignment: those of contracted factors, and
    those of partial sums that operands pass on."""
    gone = rule.reduced(index)
    axes = [a for f in rule.factors if f in gone for a in assignment.get(f, ())]
    used = {a for split in assignment.values() for a in split}
    axes += [a for a in passing_partial(op, rule, deferred) if a not in used]
    return tuple(dict.fromkeys(axes))


#: The remedy for a complete value whose type states that it is partial.
MAKE_PARTS = (
    "drop the clause, or let an op make the parts: one that sums over a dimension split over these "
    "axes, or a linear one all of whose operands are such parts"
)


def untrue_parts(
    op: Operation, rule: Rule, assignment: Assignment, deferred: Axes = ()
) -> Iterator[str]:
    """Messages for results with partial types that are not partial: reducing them would count the
    value once per rank."""
    for index, value in enumerate(op.results):
        partial = value.tensor.partial
        true = unreduced(op, rule, index, assignment, deferred)
        rest = [a for a in value.tensor.partial_axes if a not in true]
        if partial is None:
            continue
        if rest:
            yield f"gives %{value.name} whole, not unreduced over {', '.join(rest)}: {value.type}"
        elif partial.kind != rule.reduction:
            yield f"gives %{value.name} unreduced by {rule.reduction}: {value.type}"


def read_assignment(
    op: Operation, rule: Rule, sizes: Mapping[str, Expr], facts: Facts, deferred: Axes = ()
) -> dict[str, Axes]:
    """The assignment of an op with placed results.

    Factors of a result have its axes. A contracted factor has those axes of the partial sum of the
    result that split it in an operand. A special factor that is in no result has the axes of its
    operand.
    """
    assignment: dict[str, Axes] = {}
    for value, shape in zip(op.results, rule.results, strict=False):
        for d, group in zip(value.tensor.dims, shape, strict=True):
            if d.axes:
                assignment.update(distribute(group, d.axes, sizes, facts))
    used = {a for axes in assignment.values() for a in axes}
    used |= {a for axes in handed_on(op, rule, deferred).values() for a in axes}
    for factor, axes in _hidden(op, rule, sizes, facts, used).items():
        keep = tuple(a for a in axes if a not in used)
        if factor not in assignment and keep:  # an axis splits one factor only
            assignment[factor] = keep
            used |= set(keep)
    return assignment


def _hidden(
    op: Operation, rule: Rule, sizes: Mapping[str, Expr], facts: Facts, used: set[str]
) -> dict[str, Axes]:
    """Factors that are in no result, each with the most axes that an operand has for it."""
    gone = [rule.contracted(i) | rule.special for i in range(len(op.results))]
    reduced = [(g, r.tensor.partial_axes) for g, r in zip(gone, op.results, strict=True)]
    results = zip(op.results, rule.results, strict=False)  # a last one is optional
    shown = {f for _, shape in results for group in shape for f in group}
    offers: dict[str, Axes] = {}
    for group, d, _ in operand_dims(op, rule):
        for factor, axes in distribute(group, d.axes, sizes, facts).items() if d.axes else ():
            partial = {a for gone, over in reduced if factor in gone for a in over}
            special = factor in rule.special
            keep = tuple(a for a in axes if a not in used and (special or a in partial))
            if factor not in rule.whole | shown and len(keep) > len(offers.get(factor, ())):
                offers[factor] = keep
    return offers
