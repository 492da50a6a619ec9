"""Which mesh axes split which factors of an op: the link between rules and placements.

An assignment maps factors to axes. It gives the placement in which the op needs each operand, and
the placement of each result. It can be read back from results that have placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
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
    """The split of each dimension of an operand that the op accepts. It is the split that the op
    needs. Along a factor that the op gathers itself, it may be a further split."""
    needed = required_splits(shape, assignment)
    busy = {a for axes in needed for a in axes}
    found: list[Axes] = []
    for group, have, need in zip(shape, value.dims, needed, strict=True):
        further = have.axes[len(need) :] if have.axes[: len(need)] == need else ()
        alone = rule.gathered.issuperset(group) and busy.isdisjoint(further)
        found.append(have.axes if alone and further else need)
    return tuple(found)


def distribute(
    group: Group, axes: Axes, sizes: Mapping[str, Expr], facts: Facts
) -> dict[str, Axes]:
    """Give the axes of a dimension to its factors, major factor first, as far as they surely
    divide.

    A factor takes further axes only if the one before it is split completely; without that
    knowledge all axes go to the first factor.
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
    """How many of the first axes surely split a size into ones; None if not known."""
    for count in range(len(axes) + 1):
        parts = axis_size(axes[:count])
        if facts.divides(parts, size) and facts.divides(size, parts):
            return count
    return None


def handed_on(op: Operation, rule: Rule, deferred: Axes) -> dict[int, Axes]:
    """Deferred axes over which one operand alone is a partial sum that the op hands on."""
    parts = {i: op.operands[i].tensor.partial for i in rule.each}
    sums = {i: p.axes for i, p in parts.items() if p is not None and p.kind == "sum"}
    counts = [a for axes in sums.values() for a in axes if a in deferred]
    return {i: tuple(a for a in axes if counts.count(a) == 1) for i, axes in sums.items()}


def passing_partial(op: Operation, rule: Rule, deferred: Axes = ()) -> Axes:
    """Axes over which all linear operands are partial sums, so that the op may work on the
    parts; or one operand alone, if they are deferred."""
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
    """Axes over which a result is a part under an assignment: those of factors that it has not, and
    those of partial sums that all operands hand on."""
    gone = rule.reduced(index)
    axes = [a for f in rule.factors if f in gone for a in assignment.get(f, ())]
    used = {a for split in assignment.values() for a in split}
    axes += [a for a in passing_partial(op, rule, deferred) if a not in used]
    return tuple(dict.fromkeys(axes))


#: The remedy for a value whose type says that it is a part of a sum, but which is whole.
MAKE_PARTS = (
    "drop the clause, or let an op make the parts: one that sums over a dimension split over these "
    "axes, or a linear one all of whose operands are such parts"
)


def untrue_parts(
    op: Operation, rule: Rule, assignment: Assignment, deferred: Axes = ()
) -> Iterator[str]:
    """Messages for results whose types say that they are parts of a sum or maximum, but nothing
    makes them so: adding them up would count the value once for each rank."""
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
    """The assignment under which an op with placed results was placed.

    Factors of a result have its axes; a contracted factor has those axes of the result's partial
    sum by which an operand is split along it; a special factor that no result shows has what its
    operand has.
    """
    found: dict[str, Axes] = {}
    for value, shape in zip(op.results, rule.results, strict=False):
        for d, group in zip(value.tensor.dims, shape, strict=True):
            if d.axes:
                found.update(distribute(group, d.axes, sizes, facts))
    used = {a for axes in found.values() for a in axes}
    used |= {a for axes in handed_on(op, rule, deferred).values() for a in axes}
    for factor, axes in _hidden(op, rule, sizes, facts, used).items():
        keep = tuple(a for a in axes if a not in used)
        if factor not in found and keep:  # an axis splits one factor: the first that has it
            found[factor] = keep
            used |= set(keep)
    return found


def _hidden(
    op: Operation, rule: Rule, sizes: Mapping[str, Expr], facts: Facts, used: set[str]
) -> dict[str, Axes]:
    """Factors that results do not show, with the most axes that an operand has for them."""
    reduced = [
        (rule.contracted(i) | rule.special, r.tensor.partial_axes) for i, r in enumerate(op.results)
    ]
    results = zip(op.results, rule.results, strict=False)  # a last one may be left out
    shown = {f for _, shape in results for group in shape for f in group}
    offers: dict[str, Axes] = {}
    for value, shape in zip(op.operands, rule.operands, strict=True):
        for d, group in zip(value.tensor.dims, shape, strict=True):
            for factor, axes in distribute(group, d.axes, sizes, facts).items() if d.axes else ():
                partial = {a for gone, over in reduced if factor in gone for a in over}
                special = factor in rule.special
                keep = tuple(a for a in axes if a not in used and (special or a in partial))
                if factor not in rule.whole | shown and len(keep) > len(offers.get(factor, ())):
                    offers[factor] = keep
    return offers
