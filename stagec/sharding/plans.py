"""All ways to split the factors of an op over some axes.

The best placement of an op whose operands and pinned result disagree may differ from all of these.
`%y = einsum["mk,kn->mn"](%a, %b) : [M@x, N]` with `%a: [M, K@(x, y)]` and `%b: [K@x, N]`:

    k over x, y            slice %b; reduce_scatter %y over x, all_reduce it over y
    k over x, n over y     gather %a over y, slice %b; reduce_scatter %y over x, gather it over y
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from math import prod

from stagec.ir.facts import Facts
from stagec.ir.rule import Group, Rule
from stagec.ir.types import AxisUse
from stagec.sharding.assignment import Axes, distribute
from stagec.sharding.reshard_cost import Offer, ShardedOp, Split

_MOST = 1 << 7


def plans(node: ShardedOp, offers: Sequence[Offer], facts: Facts) -> list[list[Offer]]:
    """The ways to split the factors of an op over the axes of these offers; an empty list if there
    are too many.

    A factor that the op treats specially, or that is in no result, is split only by axes that an
    operand has there.
    """
    rule = node.rule
    shown = {f for shape in rule.results for group in shape for f in group}
    special = rule.whole | rule.special | rule.gathered | rule.numbered
    usual = [f for f in rule.factors if f in shown - special]
    used = {u.axis for split in node.axes.values() for u in split}
    places: dict[AxisUse, dict[str, None]] = {}
    for offer in offers:
        for use in offer.split:
            if use.axis not in used:
                more = (f for f in offer.group if f not in rule.whole)
                places.setdefault(use, dict.fromkeys(usual)).update(dict.fromkeys(more))
    if len({u.axis for u in places}) < len(places):
        return []  # an axis with two priorities
    if prod(len(factors) + 1 for factors in places.values()) > _MOST:
        return []
    hidden = {f: _offered(node, f, offers, facts) for f in rule.factors if f not in shown}
    return [
        [Offer(0, (f,), (*node.axes.get(f, ()), *uses)) for f, uses in plan.items()]
        for chosen in product(*([*factors, ""] for factors in places.values()))
        for plan in _orders(dict(zip(places, chosen, strict=True)))
        if _readable(plan, hidden)
    ]


def operands_agree(rule: Rule, placed: Iterable[Sequence[Split]]) -> bool:
    """Whether an op can use its operands, with these splits of their dimensions, without movement
    or with a slice. If the strategy then pins the result elsewhere, this is intended: a product
    whose operands are split along a contracted dimension is reduced to the pin. Dimensions that no
    axis may split are gathered by any plan."""
    splits: dict[Group, Axes] = {}
    for dims, shape in zip(placed, rule.operands, strict=True):
        for group, split in zip(shape, dims, strict=True):
            if rule.whole.issuperset(group):
                continue
            axes = tuple(use.axis for use in split)
            known = splits.setdefault(group, axes)
            longest = max(known, axes, key=len)
            if longest[: len(known)] != known or longest[: len(axes)] != axes:
                return False
            splits[group] = longest
    used = [axis for axes in splits.values() for axis in axes]
    return len(set(used)) == len(used)


def _orders(chosen: Mapping[AxisUse, str]) -> Iterator[dict[str, tuple[AxisUse, ...]]]:
    """The axes of each factor, in every order."""
    groups: dict[str, list[AxisUse]] = {}
    for use, factor in chosen.items():
        if factor:
            groups.setdefault(factor, []).append(use)
    for orders in product(*map(permutations, groups.values())):
        yield dict(zip(groups, orders, strict=True))


def _offered(node: ShardedOp, factor: str, offers: Sequence[Offer], facts: Facts) -> list[Axes]:
    """The axes by which operands are split along a factor."""
    splits = [(o.group, tuple(u.axis for u in o.split)) for o in offers if factor in o.group]
    return [distribute(g, axes, node.sizes, facts).get(factor, ()) for g, axes in splits]


def _readable(
    plan: Mapping[str, tuple[AxisUse, ...]], hidden: Mapping[str, Sequence[Axes]]
) -> bool:
    """Whether the plan can be recovered from the types of results and, for factors that are in no
    result, from the operand with the most axes (see `read_assignment`)."""
    axes = {f: tuple(u.axis for u in plan.get(f, ())) for f in hidden}
    summed = {a for split in axes.values() for a in split}
    for factor, offered in hidden.items():
        kept = [tuple(a for a in split if a in summed) for split in offered]
        if axes[factor] != max(kept, key=len, default=()):
            return False
    return True
