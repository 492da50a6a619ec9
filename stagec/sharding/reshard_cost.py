"""Ops during propagation, and the cost of their placements: the bytes that decide between
conflicting offers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise, permutations
from math import lcm
from typing import NamedTuple

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, Expr, const, evaluate, fraction, substitute
from stagec.ir.facts import Facts
from stagec.ir.module import Module
from stagec.ir.queries import ask, note, plain
from stagec.ir.rule import Group, Rule
from stagec.ir.types import DTYPE_BYTES, AxisUse, Dim, Partial, TensorType
from stagec.sharding.assignment import accepted_splits, distribute, required_splits
from stagec.sharding.reshard import Axes, NoPlanError, Resharding, Way

Split = tuple[AxisUse, ...]
_OPEN_SIZE = 1 << 12
ONCE, HALF = Fraction(1), Fraction(1, 2)
_MOST_ORDERS = 4
_NEVER = Fraction(1 << 200)


class Offer(NamedTuple):
    """A split of a dimension of an operand or result that its op may take, with its priority and
    the properties that order offers of one priority."""

    priority: int
    group: Group
    split: Split
    last: bool = True
    size: Expr = ONE
    place: int = 0


class ShardedOp:
    """An op with a rule, and the axes that its factors have so far.

    `wanted` are the pins after its results, `summed` the axes of partial sums in these. `direct`
    states that a pin is written at the result itself; then `exact` states whether the op is placed
    for the pins only (None: undecided). `plan` maps axes with a decision to the factor that they
    split, or None.
    """

    def __init__(self, op: Operation, rule: Rule, sizes: dict[str, Expr]) -> None:
        self.op, self.rule, self.sizes = op, rule, sizes
        self.axes: dict[str, Split] = {}
        self.wanted: dict[int, TensorType] = {}
        self.summed: set[str] = set()
        self.direct = False
        self.exact: bool | None = None
        self.plan: dict[str, str | None] = {}
        self._before: dict[str, tuple[str, ...]] = {}
        self._shares: dict[tuple[Group, Axes], dict[str, Axes]] = {}

    def before(self, factor: str) -> tuple[str, ...]:
        """The factors before this one in joined dimensions."""
        if factor not in self._before:
            groups = chain(*self.rule.operands, *self.rule.results)
            places = ((g, g.index(factor)) for g in groups if factor in g)
            self._before[factor] = tuple(dict.fromkeys(f for g, i in places for f in g[:i]))
        return self._before[factor]

    def shares(self, group: Group, axes: Axes, facts: Facts) -> Mapping[str, Axes]:
        """The axes of a dimension for each of its factors, see `distribute`."""
        key = group, axes
        if key not in self._shares:
            self._shares[key] = distribute(group, axes, self.sizes, facts)
        return self._shares[key]

    def split(self, group: Group) -> Split:
        """The split of a dimension of these factors."""
        return tuple(use for f in group for use in self.axes.get(f, ()))

    @property
    def assignment(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of each factor."""
        return {f: axes_of(uses) for f, uses in self.axes.items()}

    def takes(self, factor: str, axis: str) -> bool:
        """Whether the pins and the plan allow an axis to split a factor."""
        summed = factor in self.rule.reduced(0) if self.summed else False
        if axis in self.summed:
            return summed
        if axis in self.plan:
            return self.plan[axis] == factor
        return not self.exact or self._pinned(factor, axis)

    def _pinned(self, factor: str, axis: str) -> bool:
        return any(factor in group and axis in d.axes for group, d in self._wanted_dims())

    def _wanted_dims(self) -> Iterator[tuple[Group, Dim]]:
        for index, pin in self.wanted.items():
            yield from zip(self.rule.results[index], pin.dims, strict=True)

    def exactly(self, offer: Offer) -> bool:
        """Whether an offer agrees with the pins of the results."""
        return all(
            any(self._pinned(f, u.axis) or u.axis in self.summed for f in offer.group)
            for u in offer.split
        )

    def decide(self, offers: Iterable[Offer], plan: Iterable[Offer]) -> None:
        """Let the axes of these offers split the factors of the plan, or none."""
        self.plan = dict.fromkeys(u.axis for o in offers for u in o.split)
        self.plan |= {u.axis: f for o in plan for f in o.group for u in o.split}
        self.exact = all(self.exactly(o) for o in plan)

    def pins(self) -> list[Offer]:
        """The splits of the pins, as offers."""
        split = ((group, d.split) for group, d in self._wanted_dims() if d.split)
        return [Offer(min(u.priority for u in uses), group, uses) for group, uses in split]

    def orders(self, offers: list[Offer], priority: int) -> list[list[Offer]]:
        """The orders of offers that may lead to different placements, the given order first."""
        contested = self._contested(offers, priority)
        if not contested:
            return [offers]
        others = [o for o in offers if o not in contested]
        if len(contested) > _MOST_ORDERS:
            some = [[o, *(c for c in contested if c is not o)] for o in contested]
        else:
            some = [list(order) for order in permutations(contested)]
        return [[*order, *others] for order in some]

    def _contested(self, offers: list[Offer], priority: int) -> list[Offer]:
        """Conflicting offers of the first priority: of an axis to different factors, or to one
        factor after different axes."""
        open_ = [o for o in offers if o.priority <= priority]
        open_ = [o for o in open_ if not self.rule.whole.issuperset(o.group)]
        if len(open_) < 2:
            return []
        used = {u.axis for split in self.axes.values() for u in split}
        least = min(o.priority for o in open_)
        first = [o for o in open_ if o.priority == least]
        places: dict[str, set[object]] = {}
        for offer in first:
            axes = tuple(u.axis for u in offer.split)
            for i, axis in enumerate(axes):
                if axis not in used:
                    places.setdefault(axis, set()).add((offer.group, axes[:i]))
        contested = {a for a, splits in places.items() if len(splits) > 1}
        return [o for o in first if contested & {u.axis for u in o.split}]


def axes_of(split: Split) -> Axes:
    """The names of the axes of a split."""
    return tuple([use.axis for use in split])


#: A movement: the elements of the tensor, the bytes per element, and the query for its plan.
Term = tuple[Expr, Fraction, Way]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a rank sends, for the current sizes (`total`) and as terms for other sizes.
    Without terms there is no plan. `axes` is the number of axes that divide the work of the op."""

    terms: tuple[Term, ...]
    total: Fraction
    axes: int = 0


@dataclass(frozen=True, slots=True)
class Least:
    """Query: the index of the first choice, each a sum of terms, that moves the fewest bytes."""

    choices: tuple[tuple[Term, ...], ...]

    def __call__(self, values: Mapping[str, int]) -> int:
        terms = {id(term): term for term in chain.from_iterable(self.choices)}  # a hash is long
        each = {t: _bytes(term, values) for t, term in terms.items()}
        unit = lcm(*(size.denominator for size in each.values()))
        whole = {t: size.numerator * (unit // size.denominator) for t, size in each.items()}
        sums = ([whole[id(term)] for term in choice] for choice in self.choices)
        moved = [sum(sizes) if sizes else unit * _NEVER for sizes in sums]
        return moved.index(min(moved))


@dataclass(frozen=True, slots=True)
class Compared:
    """Query: whether one tensor has more elements than another (1), as many (0), or fewer (-1)."""

    one: Expr
    other: Expr

    def __call__(self, values: Mapping[str, int]) -> int:
        one, other = _elements(self.one, values), _elements(self.other, values)
        return (one > other) - (one < other)


def _bytes(term: Term, values: Mapping[str, int]) -> Fraction:
    size, each, way = term
    return _elements(size, values) * each * way.cost(values)


def _elements(size: Expr, values: Mapping[str, int]) -> int:
    """The number of elements; sizes without values count as equal large numbers."""
    if size.symbols <= values.keys():
        return evaluate(size, values)
    env = {s: const(values.get(s, _OPEN_SIZE)) for s in size.symbols}
    return int(fraction(substitute(size, env)))


class Weighing:
    """Sizes of tensors and costs of their movements in one module."""

    def __init__(self, module: Module) -> None:
        self._resharding = Resharding.of(module)
        self._values = self._resharding.values
        self._elements: dict[Expr, int] = {}

    def elements(self, size: Expr) -> int:
        """The elements of a whole tensor, as a number."""
        if size not in self._elements:
            self._elements[size] = _elements(size, plain(self._values))
        return self._elements[size]

    def may_split(self, axes: Axes, dim: Dim) -> bool:
        """Whether a dimension is known to divide over these axes."""
        may = self._resharding.may_split(axes, dim)
        return may if isinstance(may, bool) else ask(may, self._values)

    def in_order(self, offers: list[Offer]) -> list[Offer]:
        """Offers in the order in which an op takes them: by priority, then the largest operands
        first."""
        if len(offers) < 2:
            return offers
        return sorted(offers, key=lambda o: (o.priority, o.last, -self.elements(o.size), o.place))

    def note_order(self, offers: list[Offer]) -> None:
        """Note the comparisons of sizes that order these offers."""
        for one, other in pairwise(offers):
            if (one.priority, one.last) == (other.priority, other.last) and one.size != other.size:
                ask(Compared(one.size, other.size), self._values)

    def least(self, moved: Sequence[Moved]) -> int:
        """The index of the first one that moves the fewest bytes; noted as a query."""
        best = min(range(len(moved)), key=lambda i: moved[i].total)
        note(Least(tuple(m.terms for m in moved)), best, self._values)
        return best

    def moved(self, node: ShardedOp, have: Sequence[TensorType], passing: frozenset[str]) -> Moved:
        """Bytes that a rank sends for operands with the placements `have`, and for results; the op
        passes on partial sums over `passing`.

        A partial result without a pin will be reduced, which costs at least a reduce_scatter.
        """
        terms, total, assignment = list[Term](), Fraction(), node.assignment
        moves = list[tuple[TensorType, Sequence[Axes], Axes, Fraction]]()
        for type_, shape in zip(have, node.rule.operands, strict=True):
            need = accepted_splits(type_, shape, node.rule, assignment)
            moves.append((type_, need, tuple(a for a in type_.partial_axes if a in passing), ONCE))
        for value in node.op.results:
            gives, want = _given(node, value.index, passing), node.wanted.get(value.index)
            splits: Sequence[Axes] = [d.axes for d in (want or gives).dims]
            moves.append((gives, splits, want.partial_axes if want else (), ONCE if want else HALF))
        for type_, splits, partial, share in moves:
            try:
                resharding = self._resharding.find(type_, splits, partial)
            except NoPlanError:
                return Moved((), _NEVER)
            bytes_ = share * DTYPE_BYTES[type_.dtype]
            total += self.elements(type_.elements) * bytes_ * resharding.cost
            terms.append((type_.elements, bytes_, resharding.way))
        return Moved(tuple(terms), total, sum(map(len, assignment.values())))


def _given(node: ShardedOp, index: int, passing: frozenset[str]) -> TensorType:
    """The type of a result under the current assignment."""
    rule, assignment = node.rule, node.assignment
    gone = rule.reduced(index)
    used = {a for axes in assignment.values() for a in axes}
    axes = [a for f in rule.factors if f in gone for a in assignment.get(f, ())]
    axes += sorted(passing - used)
    partial = Partial(rule.reduction, tuple(dict.fromkeys(axes))) if axes else None
    splits = required_splits(rule.results[index], assignment)
    return node.op.results[index].tensor.with_splits(splits, partial)
