"""The ops whose placement is to be found, and what moves if they are placed so: the bytes that
decide between offers that exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const, fraction, substitute
from stagec.ir.module import Module
from stagec.ir.rule import Group, Rule
from stagec.ir.types import DTYPE_BYTES, AxisUse, Partial, TensorType
from stagec.sharding.assignment import accepted_splits, required_splits
from stagec.sharding.reshard import NoPlanError, Resharding

Split = tuple[AxisUse, ...]
_OPEN_SIZE = 1 << 12
_MOST_ORDERS = 4
_NEVER = Fraction(1 << 200)


@dataclass(frozen=True, slots=True)
class Offer:
    """A split of a dimension of an operand or result that its op might take: with its priority, and
    what decides between offers of one priority."""

    priority: int
    key: tuple[bool, int, int]
    group: Group
    split: Split


class Node:
    """An op with a rule: its factors' axes as found so far.

    `wanted` are the pins behind its results, `summed` the axes that these have as partial sums. If
    a pin was `direct`, written at the result itself, `exact` says whether the op is placed for it
    alone; None as long as that is not decided.
    """

    def __init__(self, op: Operation, rule: Rule, sizes: dict[str, Expr]) -> None:
        self.op, self.rule, self.sizes = op, rule, sizes
        self.axes: dict[str, Split] = {}
        self.wanted: dict[int, TensorType] = {}
        self.summed: set[str] = set()
        self.direct = False
        self.exact: bool | None = None

    def split(self, group: Group) -> Split:
        """What splits a dimension of these factors."""
        return tuple(use for f in group for use in self.axes.get(f, ()))

    @property
    def assignment(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of each factor."""
        return {f: tuple(u.axis for u in uses) for f, uses in self.axes.items()}

    def takes(self, factor: str, axis: str) -> bool:
        """Whether the pins let an axis split a factor."""
        summed = factor in self.rule.contracted(0) - self.rule.special if self.summed else False
        if axis in self.summed:
            return summed
        return not self.exact or self._pinned(factor, axis)

    def _pinned(self, factor: str, axis: str) -> bool:
        dims = [
            (group, d)
            for index, pin in self.wanted.items()
            for group, d in zip(self.rule.results[index], pin.dims, strict=True)
        ]
        return any(factor in group and axis in d.axes for group, d in dims)

    def exactly(self, offer: Offer) -> bool:
        """Whether an offer, if it is taken, leaves the results as pinned."""
        return all(
            any(self._pinned(f, u.axis) or u.axis in self.summed for f in offer.group)
            for u in offer.split
        )

    def pins(self) -> list[Offer]:
        """The splits of the pins, as offers."""
        return [
            Offer(min(u.priority for u in d.split), (True, 0, 0), group, d.split)
            for index, pin in self.wanted.items()
            for group, d in zip(self.rule.results[index], pin.dims, strict=True)
            if d.split
        ]

    def orders(self, offers: list[Offer], priority: int) -> list[list[Offer]]:
        """The orders that may lead to different placements; the first one is the given one."""
        contested = self._contested(offers, priority)
        others = [o for o in offers if o not in contested]
        if len(contested) > _MOST_ORDERS:
            some = [[o, *(c for c in contested if c is not o)] for o in contested]
        else:
            some = [list(order) for order in permutations(contested)]
        return [[*order, *others] for order in some]

    def _contested(self, offers: list[Offer], priority: int) -> list[Offer]:
        """Offers of one priority that exclude each other: of an axis to different factors, or to
        one behind different axes."""
        used = {u.axis for split in self.axes.values() for u in split}
        open_ = [o for o in offers if o.priority <= priority]
        open_ = [o for o in open_ if not self.rule.whole.issuperset(o.group)]
        first = [o for o in open_ if o.priority == min(x.priority for x in open_)]
        places: dict[str, set[object]] = {}
        for offer in first:
            axes = tuple(u.axis for u in offer.split)
            for i, axis in enumerate(axes):
                if axis not in used:
                    places.setdefault(axis, set()).add((offer.group, axes[:i]))
        contested = {a for a, found in places.items() if len(found) > 1}
        return [o for o in first if contested & {u.axis for u in o.split}]


class Weighing:
    """Sizes of tensors and costs of their movements, in one module."""

    def __init__(self, module: Module) -> None:
        self._env = module.env
        self._resharding = Resharding.of(module)
        self.may_split = self._resharding.may_split
        self._elements: dict[Expr, int] = {}

    def elements(self, type_: TensorType) -> int:
        """The elements of the whole tensor. Open sizes count as large, all alike: only the degree
        matters then."""
        size = type_.elements
        if size not in self._elements:
            env = {s: const(self._env.get(s, _OPEN_SIZE)) for s in size.symbols}
            self._elements[size] = int(fraction(substitute(size, env)))
        return self._elements[size]

    def moved(self, node: Node, have: Sequence[TensorType], passing: frozenset[str]) -> Fraction:
        """Bytes that a rank sends for operands, which are placed so, and results; the op hands on
        partial sums over `passing`.

        A partial sum of which nothing is known will be reduced: a reduce_scatter at least.
        """
        total, assignment = Fraction(), node.assignment
        for type_, shape in zip(have, node.rule.operands, strict=True):
            need = accepted_splits(type_, shape, node.rule, assignment)
            kept = tuple(a for a in type_.partial_axes if a in passing)
            total += self._bytes(type_) * self._resharding.cost(type_, need, kept)
        for value in node.op.results:
            gives, want = _given(node, value.index, passing), node.wanted.get(value.index)
            splits = [d.axes for d in (want or gives).dims]
            try:
                cost = self._resharding.cost(gives, splits, want.partial_axes if want else ())
            except NoPlanError:
                return _NEVER
            total += self._bytes(gives) * (cost if want else cost / 2)
        return total

    def _bytes(self, type_: TensorType) -> int:
        return self.elements(type_) * DTYPE_BYTES[type_.dtype]


def _given(node: Node, index: int, passing: frozenset[str]) -> TensorType:
    """A result as the op gives it."""
    rule, assignment = node.rule, node.assignment
    gone = rule.contracted(index) - rule.special
    used = {a for axes in assignment.values() for a in axes}
    axes = [a for f in rule.factors if f in gone for a in assignment.get(f, ())]
    axes += sorted(passing - used)
    partial = Partial(rule.reduction, tuple(dict.fromkeys(axes))) if axes else None
    splits = required_splits(rule.results[index], assignment)
    return node.op.results[index].tensor.with_splits(splits, partial)
