"""The ops that fill rows which are numbered within the part of a rank.

`stg.dispatch` fills the rows of experts in the order of the tokens of a rank. With tokens split
over tp and unused capacity, the rows of the ranks follow each other, each with its own gaps:

    rank 0     rank 1         one rank with all tokens
    a b . .    c d . .        a b c d . . . .

The op that takes the rows out again also counts tokens, so it must have the same split of them. A
gather of the rows between the two does not change this.
"""

from stagec.ir.core import Operation, Region, Value
from stagec.ir.rewrite import carried
from stagec.ir.rule import Group, Rule
from stagec.ir.traits import HasRegion, Repeats
from stagec.support.diagnostics import note


class RowSources:
    """Finds the ops that fill the rows of dimensions. Results are cached; they do not depend on
    placements."""

    def __init__(self) -> None:
        self._sources: dict[tuple[Value, int], Operation | None] = {}

    def taken(self, op: Operation, factor: str) -> list[Operation]:
        """The ops that filled the rows of the operands of an op in joined dimensions with this
        factor."""
        rule = op.definition.rule(op)
        groups = {g for s in rule.operands for g in s if factor in g and len(g) > 1} if rule else ()
        return [f for group in groups for f in self.of_group(op, group)]

    def of_group(self, op: Operation, group: Group) -> list[Operation]:
        """The ops that filled the rows of operands with a dimension of these factors."""
        rule = op.definition.rule(op)
        shapes = zip(op.operands, rule.operands, strict=True) if rule is not None else ()
        fillers = [self.filler(v, s.index(group)) for v, s in shapes if group in s]
        return list(dict.fromkeys(f for f in fillers if f is not None))

    def filler(self, value: Value, dim: int) -> Operation | None:
        """The op that filled the rows of a dimension; None if they are not numbered."""
        if (value, dim) not in self._sources:
            self._sources[value, dim] = None  # ends the recursion for carried values
            self._sources[value, dim] = self._look(value, dim)
        return self._sources[value, dim]

    def _look(self, value: Value, dim: int) -> Operation | None:
        op = value.producer
        if op is None:
            return self._entered(value, dim)
        if op.region is not None:
            return self._left(op, value, dim)
        rule = op.definition.rule(op)
        if rule is None:
            return None
        group = rule.results[value.index][dim]
        if len(group) > 1 and not rule.numbered.isdisjoint(group):
            return op
        return next(iter(self.of_group(op, group)), None)

    def _entered(self, arg: Value, dim: int) -> Operation | None:
        """The filler of an argument of a region, from the value that enters it."""
        owner = arg.region.owner
        if not owner.has(HasRegion) or arg.index >= len(owner.operands):
            return None
        sliced = owner.has(Repeats) and arg.index >= carried(owner)
        return self.filler(owner.operands[arg.index], dim + sliced)

    def _left(self, op: Operation, value: Value, dim: int) -> Operation | None:
        """The filler of a result of an op with a region, from the value that the region yields."""
        inner = op.body.terminator.operands[value.index]
        if not op.has(Repeats) or value.index < carried(op):
            return self.filler(inner, dim)
        return self.filler(inner, dim - 1) if dim else None


def check_rows(region: Region) -> None:
    """Raises `DiagnosticError` for an op that takes or joins rows which were numbered under another
    split than its own. All types must have placements."""
    rows = RowSources()
    ruled = ((op, op.definition.rule(op)) for op in region.walk() if op.region is None)
    rules = [(op, rule) for op, rule in ruled if rule is not None]
    for op, rule in rules if any(rule.numbered for _, rule in rules) else ():
        for group in {g: None for s in rule.operands for g in s}:
            fillers = rows.of_group(op, group)
            if not rule.numbered.isdisjoint(group) and len(group) > 1:
                fillers.append(op)
            for other in fillers[1:]:
                _compare(op, fillers[0], other)


def _compare(op: Operation, filler: Operation, other: Operation) -> None:
    one, two = _split(filler), _split(other)
    if one == two:
        return
    raise op.error(
        f"'{op.name}' reads rows that '{filler.name}' numbers by tokens {_over(one)}, but its own "
        f"tokens are {_over(two)}",
        remedy="split the tokens of both in the same way",
        notes=[note("the rows are filled here", filler.loc)],
    )


def _split(op: Operation) -> tuple[str, ...]:
    """The axes of the numbered factor of an op, which each of its results has."""
    rule: Rule | None = op.definition.rule(op)
    assert rule is not None
    return next(
        d.axes
        for v, s in zip(op.results, rule.results, strict=True)
        for d, g in zip(v.tensor.dims, s, strict=True)
        if not rule.numbered.isdisjoint(g)
    )


def _over(axes: tuple[str, ...]) -> str:
    return f"split over {', '.join(axes)}" if axes else "that are not split"
