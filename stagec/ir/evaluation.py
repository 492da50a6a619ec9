"""Fast and exact evaluation: nodes of expressions as functions of the values of their symbols.

A node is compiled once to nested functions, which compute with integers; fractions appear only
where a division is not exact. `2*B*S/tp` becomes

    over = 2 * B * S;  under = tp;  over // under, if that is exact

The module does not import sympy, but queries attributes of nodes; `stagec.ir.expr` defines their
meaning.
"""

# sympy ships partial types only, so nodes are of no type here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from operator import itemgetter
from typing import Any, TypeAlias

from stagec.ir.buckets import count_buckets

BUCKETS = "buckets"
REACHED = "reached"
FULLEST = "fullest"
#: Fractional bits of the share in `reached`, of the probability of a part, and of probabilities.
_SHARE = 256
_MEAN, _CHANCE = 16, 64
#: The most parts and ranks of `fullest`: more than the experts of any model; takes half a second.
_MOST = 1 << 10
Number: TypeAlias = int | Fraction
Function: TypeAlias = Callable[[Mapping[str, Any]], Number]


@lru_cache(maxsize=1 << 16)
def function_of(node: Any) -> Function:
    """A node as a function of the values of its symbols; integral results are ints."""
    if node.is_Symbol:
        return itemgetter(node.name)
    if node.is_Rational:
        number = _quotient(int(node.p), int(node.q))
        return lambda env: number
    if node.is_Mul or node.is_Pow:
        return _ratio(node)
    name = node.func.__name__
    if name == BUCKETS:
        return _buckets(node)
    parts = [function_of(a) for a in node.args]
    if node.is_Add:
        return lambda env: sum([f(env) for f in parts])
    return lambda env: compute(name, [f(env) for f in parts])


def compute(function: str, values: Sequence[Number]) -> Number:
    """`max`, `min`, `ceildiv`, `reached`, `fullest` or `mod` of numbers."""
    if function == "max":
        return max(values)
    if function == "min":
        return min(values)
    if function == REACHED:
        return reached(*values)
    if function == FULLEST:
        return fullest(*values)
    a, b = values
    if function == "ceildiv":
        return -(-a // b)
    return a % b


@lru_cache(maxsize=1 << 12)
def reached(whole: Number, parts: Number, k: Number, draws: Number) -> int:
    """The amount on the parts that are reached on average, if `whole` is spread evenly over `parts`
    and each of `draws` draws reaches k of them: `whole * (1 - (1 - k/parts) ^ draws)`, to the
    nearest integer. `draws` is rounded up. Integer arithmetic makes results equal on all
    machines."""
    missed, one = Fraction(max(parts - k, 0)) / Fraction(parts), 1 << _SHARE
    factor, left, n = one * missed.numerator // missed.denominator, one, ceil(draws)
    while n > 0 and left:
        left = left * factor >> _SHARE if n & 1 else left
        factor, n = factor * factor >> _SHARE, n >> 1
    return floor(Fraction(whole) * Fraction(one - left, one) + Fraction(1, 2))


def fullest(whole: Number, some: Number, of: Number, parts: Number, ranks: Number) -> int:
    """The expected largest amount on one of `ranks`, if `whole` is spread evenly over the `parts`
    of each rank, which are present independently with the probability `some / of`: the mean of the
    maximum of `ranks` binomial numbers over `parts`, to the nearest integer. `parts` and `ranks`
    are capped at 1,024. Integer arithmetic throughout."""
    share = floor(Fraction(some) / Fraction(of) * (1 << _MEAN) + Fraction(1, 2))
    n, r = (min(max(1, ceil(number)), _MOST) for number in (parts, ranks))
    most = _fullest(min(max(share, 0), 1 << _MEAN), n, r)
    return floor(Fraction(whole) * most + Fraction(1, 2))


@lru_cache(maxsize=1 << 12)
def _fullest(share: int, parts: int, ranks: int) -> Fraction:
    """The mean of the largest binomial number, divided by `parts`: the sum over n < parts of `1 -
    P(number <= n) ^ ranks`. Probabilities are integers over a power of two."""
    missed = (1 << _MEAN) - share
    if not missed:
        return Fraction(1)
    one, chance, below, most = 1 << _CHANCE, missed**parts, 0, 0
    for n in range(parts):
        below += chance
        most += one - ((below << _CHANCE >> _MEAN * parts) ** ranks >> _CHANCE * (ranks - 1))
        chance = chance * (parts - n) * share // ((n + 1) * missed)
    return Fraction(most, parts * one)


def _buckets(node: Any) -> Function:
    full, *rows = node.args
    wanted, parts = function_of(full), [[function_of(a) for a in row] for row in rows]

    def count(env: Mapping[str, Any]) -> int:
        sizes = [[Fraction(f(env)) for f in row] for row in parts]
        return count_buckets(Fraction(wanted(env)), [(row[0], row[1:]) for row in sizes])

    return count


def _ratio(node: Any) -> Function:
    """A product of powers: the numerator divided by the denominator."""
    above: list[tuple[Function, int]] = []
    below: list[tuple[Function, int]] = []
    number, factors = node.as_coeff_Mul()
    for factor in factors.args if factors.is_Mul else (factors,):
        base, exponent = (factor.base, int(factor.exp)) if factor.is_Pow else (factor, 1)
        (above if exponent > 0 else below).append((function_of(base), abs(exponent)))
    p, q = int(number.p), int(number.q)

    def divide(env: Mapping[str, Any]) -> Number:
        over: Number = p
        under: Number = q
        for f, exponent in above:
            over *= f(env) ** exponent
        for f, exponent in below:
            under *= f(env) ** exponent
        return _quotient(over, under)

    return divide


def _quotient(over: Number, under: Number) -> Number:
    """A quotient, as an int if it is integral."""
    if isinstance(over, int) and isinstance(under, int) and not over % under:
        return over // under
    quotient = Fraction(over) / Fraction(under)
    return quotient.numerator if quotient.denominator == 1 else quotient
