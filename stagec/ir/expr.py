"""Symbolic sizes: the one file that imports sympy.

`Expr` is a thin typed wrapper of a sympy expression whose symbols are positive integers. The rest
of the compiler sees exact integer arithmetic and nothing of sympy. Text never reaches sympy:
expressions are built from tokens, operator by operator.
"""

# sympy ships partial types only; this file is the fence around them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from itertools import product as combinations
from typing import Any, TypeAlias

import sympy

from stagec.ir.evaluation import BUCKETS, FULLEST, REACHED, compute, function_of
from stagec.ir.expr_text import MOD, text_of
from stagec.support.diagnostics import NotAnIntegerError

#: Integers in a program are bounded, so that hostile text cannot make arithmetic slow.
MAX_INTEGER = 2**63 - 1
MAX_EXPONENT = 64
MAX_EXPONENT_OF_SUMS = 8
FUNCTIONS = ("max", "min", "ceildiv", REACHED, FULLEST, BUCKETS)

#: Values of symbols.
Env: TypeAlias = Mapping[str, int] | Mapping[str, int | Fraction]


class UnboundError(Exception):
    """An expression was evaluated with a symbol that has no value."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(f"no value for {', '.join(self.names)}")

    def __reduce__(self) -> tuple[type[UnboundError], tuple[tuple[str, ...]]]:
        return UnboundError, (self.names,)  # errors cross processes


#: All expressions, by their nodes.
_exprs: dict[Any, Expr] = {}


class Expr:
    """An immutable symbolic integer; `/` is exact division, which the caller must ensure.

    Equal expressions are one object, so that comparing and hashing them is cheap. `value` is the
    number, if this is an integer constant."""

    __slots__ = ("_symbols", "node", "value")
    node: Any
    value: int | None
    _symbols: frozenset[str] | None

    def __new__(cls, node: Any) -> Expr:
        expr = _exprs.get(node)
        if expr is None:
            made = super().__new__(cls)
            made.node, made._symbols = node, None
            made.value = int(node) if isinstance(node, sympy.Integer) else None
            expr = _exprs.setdefault(node, made)
        return expr

    def __add__(self, other: Expr | int) -> Expr:
        return _plus(self, other)

    def __sub__(self, other: Expr | int) -> Expr:
        return _minus(self, other)

    def __mul__(self, other: Expr | int) -> Expr:
        return _times(self, other)

    def __truediv__(self, other: Expr | int) -> Expr:
        return _over(self, other)

    def __mod__(self, other: Expr | int) -> Expr:
        return _apply(MOD, (self.node, _node(other)))

    def __neg__(self) -> Expr:
        return _times(self, -1)

    def __pow__(self, exponent: int) -> Expr:
        return Expr(_distribute_terms(self.node**exponent))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Expr:
        return _minus(const(other), self)

    def __eq__(self, other: object) -> bool:
        if type(other) is int:  # a size of 1 is not the flag True
            return bool(self.node == other)
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Expr], tuple[Any]]:
        return Expr, (self.node,)

    def __str__(self) -> str:
        return text_of(self.node)

    def __repr__(self) -> str:
        return f"Expr({self})"

    @property
    def symbols(self) -> frozenset[str]:
        """The names of its symbols."""
        if self._symbols is None:
            self._symbols = frozenset(s.name for s in self.node.free_symbols)
        return self._symbols

    @property
    def symbol_name(self) -> str | None:
        """The name, if this is a bare symbol."""
        return str(self.node.name) if isinstance(self.node, sympy.Symbol) else None


def _node(value: Expr | int) -> Any:
    return value.node if isinstance(value, Expr) else sympy.Integer(value)


# A module has few distinct sizes, each many times, so results of frequent operations are cached.
_memo = lru_cache(maxsize=1 << 16)


@_memo
def _plus(left: Expr, right: Expr | int) -> Expr:
    return Expr(_distribute_terms(left.node + _node(right)))


@_memo
def _minus(left: Expr, right: Expr | int) -> Expr:
    return Expr(_distribute_terms(left.node - _node(right)))


@_memo
def _times(left: Expr, right: Expr | int) -> Expr:
    return Expr(_distribute_terms(left.node * _node(right)))


@_memo
def _over(left: Expr, right: Expr | int) -> Expr:
    return Expr(_distribute_terms(left.node / _node(right)))


@_memo
def _distribute(node: Any) -> Any:
    """Distribute a number over a sum in a product. Sympy does so only in some cases."""
    if not isinstance(node, sympy.Mul):
        return node
    number, rest = node.as_coeff_Mul()
    factors = sympy.Mul.make_args(rest)
    place = next((i for i, f in enumerate(factors) if isinstance(f, sympy.Add)), None)
    if number == 1 or place is None:
        return node
    others = (*factors[:place], *factors[place + 1 :])
    terms = sympy.Add(*(_distribute(number * term) for term in factors[place].args))
    return sympy.Mul(_distribute_terms(terms), *others)


def _distribute_terms(node: Any) -> Any:
    """Distribute numbers in each term of a sum, since equal terms have become a number times one of
    them."""
    if not isinstance(node, sympy.Add):
        return _distribute(node)
    while any(_is_undistributed(term) for term in node.args):
        node = sympy.Add(*(_distribute(term) for term in node.args))
    return node


def _is_undistributed(node: Any) -> bool:
    if not isinstance(node, sympy.Mul) or not node.args[0].is_Number:
        return False
    return any(isinstance(factor, sympy.Add) for factor in node.args)


@cache
def symbol(name: str) -> Expr:
    """The symbol of this name, a positive integer. All symbols are made here."""
    return Expr(sympy.Symbol(name, integer=True, positive=True))


@lru_cache(maxsize=4096)
def const(value: int) -> Expr:
    """An integer constant."""
    return Expr(sympy.Integer(value))


ONE = const(1)
ZERO = const(0)


def as_expr(value: Expr | int) -> Expr:
    """The expression itself, or the constant."""
    return value if isinstance(value, Expr) else const(value)


def product(factors: Iterable[Expr]) -> Expr:
    """The product; 1 if there are none."""
    return _product(tuple(factors))


@_memo
def _product(factors: tuple[Expr, ...]) -> Expr:
    return Expr(_distribute_terms(sympy.Mul(*(f.node for f in factors)))) if factors else ONE


def total(terms: Iterable[Expr]) -> Expr:
    """The sum; 0 if there are none."""
    return _total(tuple(terms))


@_memo
def _total(terms: tuple[Expr, ...]) -> Expr:
    if not terms:
        return ZERO
    counts = Counter(terms)  # many buffers have few distinct sizes
    nodes = (t.node if count == 1 else count * t.node for t, count in counts.items())
    return Expr(_distribute_terms(sympy.Add(*nodes)))


def maximum(values: Iterable[Expr]) -> Expr:
    """The largest, kept as a call if it depends on symbols; 0 if there are none."""
    unique = list(dict.fromkeys(values))
    return call("max", unique) if unique else ZERO


def call(function: str, arguments: Iterable[Expr]) -> Expr:
    """`max`, `min`, `ceildiv`, `reached` or `fullest`, folded where the arguments are numbers."""
    return _apply(function, tuple(a.node for a in arguments))


def alternatives(value: Expr) -> tuple[Expr, ...]:
    """The arguments of a `max` or a `min`; of another expression itself."""
    name = getattr(value.node.func, "__name__", "")
    return tuple(map(Expr, value.node.args)) if name in ("max", "min") else (value,)


def buckets(full: Expr, runs: Iterable[tuple[Expr, Sequence[Expr]]]) -> Expr:
    """The number of buckets that these sizes fill, see `count_buckets`: rows of sizes, each with
    its repetition count. In text `buckets(25, (1, 4*D), (L, 8*D, 2*D))`."""
    rows = (sympy.Tuple(times.node, *(s.node for s in sizes)) for times, sizes in runs)
    node = sympy.Function(BUCKETS)(full.node, *rows)
    return Expr(node) if node.free_symbols else const(int(function_of(node)({})))


@_memo
def expand(value: Expr) -> Expr:
    """Products multiplied out: the normal form in which equal polynomials are the same."""
    factors = sympy.Mul.make_args(value.node)
    if all(f.is_Symbol or f.is_Rational or (f.is_Pow and f.base.is_Symbol) for f in factors):
        return value
    return Expr(sympy.expand(value.node))


def same(left: Expr, right: Expr) -> bool:
    """Whether both are equal for all values of their symbols."""
    return left is right or expand(left - right) is ZERO


def _apply(function: str, arguments: tuple[Any, ...]) -> Expr:
    if function == BUCKETS:
        full, *rows = arguments
        return buckets(Expr(full), [(Expr(r[0]), [Expr(s) for s in r[1:]]) for r in rows])
    if all(isinstance(a, sympy.Integer) for a in arguments):
        return const(int(compute(function, [int(a) for a in arguments])))
    if function in ("max", "min"):
        arguments = _prune(function, arguments)
        if len(arguments) == 1:
            return Expr(arguments[0])
    # Undefined functions: sympy's own Max and Mod spend seconds on comparing symbols.
    return Expr(sympy.Function(function)(*arguments))


def _prune(function: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Flatten nested calls, fold the numbers, drop duplicates; the order stays."""
    flat: list[Any] = []
    numbers: list[int] = []
    for a in arguments:
        nested = getattr(getattr(a, "func", None), "__name__", "") == function
        for item in a.args if nested else (a,):
            numbers.append(int(item)) if isinstance(item, sympy.Integer) else flat.append(item)
    if numbers:
        best = max(numbers) if function == "max" else min(numbers)
        flat.append(sympy.Integer(best))
    return tuple(dict.fromkeys(flat))


def substitute(value: Expr, env: Mapping[str, Expr]) -> Expr:
    """Replace symbols by expressions; calls whose arguments become numbers are folded.

    Raises ZeroDivisionError if a divisor becomes 0.
    """
    if not value.symbols & env.keys():
        return value
    node = _rebuild(value.node, {k: v.node for k, v in env.items()})
    if node.has(sympy.zoo, sympy.nan):
        raise ZeroDivisionError(f"'{value}' divides by zero")
    return Expr(node)


def _rebuild(node: Any, env: dict[str, Any]) -> Any:
    if isinstance(node, sympy.Symbol):
        return env.get(node.name, node)
    if not node.args:
        return node
    args = tuple(_rebuild(a, env) for a in node.args)
    if isinstance(node, sympy.core.function.AppliedUndef):
        return _apply(node.func.__name__, args).node
    return _distribute_terms(node.func(*args))


def evaluate(value: Expr, env: Env) -> int:
    """The number for these values of the symbols.

    Raises `UnboundError` for a symbol without value, `NotAnIntegerError` if a division is not
    exact, or by zero.
    """
    try:
        values = tuple([env[name] for name in _names(value)])
    except KeyError:
        raise UnboundError(value.symbols - env.keys()) from None
    try:
        result = _evaluated(value, values)
    except ZeroDivisionError:
        raise NotAnIntegerError(str(value), None) from None
    if result.denominator != 1:
        raise NotAnIntegerError(str(value), Fraction(result))
    return result.numerator


def function(value: Expr) -> Callable[[Mapping[str, int]], int | Fraction]:
    """The expression as a function of the values of its symbols, for many evaluations; integral
    results are ints. The function raises KeyError for a symbol without value."""
    return function_of(value.node)


@_memo
def _names(value: Expr) -> tuple[str, ...]:
    return tuple(sorted(value.symbols))


@_memo
def _evaluated(value: Expr, values: tuple[int | Fraction, ...]) -> int | Fraction:
    """The number for these values of its symbols, in the order of their names."""
    return function_of(value.node)(dict(zip(_names(value), values, strict=True)))


# -- properties, and guards for untrusted text -----------------------------------------------------


def modulo_parts(value: Expr) -> tuple[Expr, Expr] | None:
    """(a, b) if the expression is `a % b`."""
    node = value.node
    if isinstance(node, sympy.core.function.AppliedUndef) and node.func.__name__ == MOD:
        return Expr(node.args[0]), Expr(node.args[1])
    return None


def too_large(value: Expr, max_terms: int, max_coefficient: int) -> bool:
    """Whether the expression has too many terms when expanded, or a huge coefficient or
    exponent."""
    if any(abs(int(p.exp)) > _most(p) for p in value.node.atoms(sympy.Pow)):
        return True
    return _terms(value.node, max_terms) > max_terms or _huge(value.node, max_coefficient)


def _most(power: Any) -> int:
    """The largest exponent that can be written for the base of a power."""
    return MAX_EXPONENT if isinstance(power.base, sympy.Symbol) else MAX_EXPONENT_OF_SUMS


def _terms(node: Any, limit: int) -> int:
    if isinstance(node, sympy.Add):
        if len(node.args) > limit:
            return limit + 1
        return min(limit + 1, sum(_terms(a, limit) for a in node.args))
    if isinstance(node, sympy.Pow):
        return min(limit + 1, _terms(node.base, limit) ** abs(int(node.exp)))
    if isinstance(node, sympy.Mul):
        count = 1
        for a in node.args:
            count = min(limit + 1, count * _terms(a, limit))
        return count
    if isinstance(node, sympy.core.function.AppliedUndef | sympy.Tuple):
        return max(_terms(a, limit) for a in node.args)
    return 1


def _huge(node: Any, limit: int) -> bool:
    coefficients = [t.as_coeff_Mul()[0] for t in sympy.Add.make_args(node)]
    numbers = [c for c in coefficients if isinstance(c, sympy.Rational)]
    return any(abs(c.p) > limit or c.q > limit for c in numbers)


def numerator_and_denominator(value: Expr) -> tuple[Expr, Expr]:
    """(B, 4) for `B/4`."""
    above, below = value.node.as_numer_denom()
    return Expr(above), Expr(below)


def ratio(above: Expr, below: Expr) -> Expr:
    """A readable quotient: without fractions in its parts and without common factors."""
    (a, under_a), (b, under_b) = (sympy.expand(e.node).as_numer_denom() for e in (above, below))
    node = sympy.gcd_terms(a) * under_b / (sympy.gcd_terms(b) * under_a)
    return Expr(_distribute_terms(node))


def fraction(value: Expr) -> Fraction:
    """A constant as a fraction. Raises `UnboundError` if it contains symbols."""
    if value.symbols:
        raise UnboundError(value.symbols)
    return Fraction(function_of(value.node)({}))


@lru_cache(maxsize=1 << 16)
def is_integral(value: Expr) -> bool:
    """Whether the expression is an integer by its form: no term has a denominator.

    | expression      | integral |
    |-----------------|----------|
    | `2*S`           | yes      |
    | `(S + S^2)/S`   | yes      |
    | `ceildiv(S, 2)` | yes      |
    | `S/2`           | no       |
    | `max(S/2, B)`   | no       |
    """
    node = value.node
    return _is_integral(sympy.expand(node) if node.has(sympy.Add) else node)


@_memo
def _is_integral(node: Any) -> bool:
    if isinstance(node, sympy.Symbol):
        return True
    if isinstance(node, sympy.Rational):
        return bool(node.q == 1)
    if isinstance(node, sympy.Pow):
        return bool(node.exp > 0) and _is_integral(node.base)
    if node.func.__name__ in ("ceildiv", REACHED, FULLEST, BUCKETS):
        return True
    return all(_is_integral(a) for a in node.args)


def product_is_integral(left: Expr, right: Expr) -> bool:
    """Whether the product of both is an integer by its form. For sums of products of powers it is
    found without building the product."""
    terms: dict[frozenset[tuple[str, int]], Fraction] = {}
    sums = [[*map(_powers, sympy.Add.make_args(e.node))] for e in (left, right)]
    for one, other in combinations(*sums):
        if one is None or other is None:
            return is_integral(left * right)
        (p, above), (q, below) = one, other
        powers = ((n, above.get(n, 0) + below.get(n, 0)) for n in {*above, *below})
        term = frozenset((n, power) for n, power in powers if power)
        terms[term] = terms.get(term, Fraction(0)) + p * q
    left_over = ((c.denominator == 1, *(e > 0 for _, e in t)) for t, c in terms.items() if c)
    return all(map(all, left_over))


@_memo
def _powers(node: Any) -> tuple[Fraction, Mapping[str, int]] | None:
    """The coefficient and the exponents of a product of powers of symbols; None for other nodes,
    and for 0."""
    coefficient, rest = node.as_coeff_Mul()
    powers = [f.as_base_exp() for f in sympy.Mul.make_args(rest) if f != 1]
    plain = all(isinstance(b, sympy.Symbol) and isinstance(e, sympy.Integer) for b, e in powers)
    if not plain or not isinstance(coefficient, sympy.Rational) or coefficient == 0:
        return None
    number = Fraction(int(coefficient.p), int(coefficient.q))
    return number, {str(base.name): int(exponent) for base, exponent in powers}


def is_quadratic(value: Expr) -> bool:
    """Whether the expression grows with the square of some symbol: `B*S^2`."""
    powers = sympy.expand(value.node).atoms(sympy.Pow)
    return any(isinstance(p.base, sympy.Symbol) and p.exp > 1 for p in powers)


def terms(value: Expr) -> dict[str, Fraction]:
    """The expanded expression as monomials (their text) with coefficients."""
    sums: dict[str, Fraction] = {}
    for node in sympy.Add.make_args(sympy.expand(value.node)):
        coefficient, monomial = node.as_coeff_Mul()
        key = text_of(monomial)
        sums[key] = sums.get(key, Fraction(0)) + Fraction(int(coefficient.p), int(coefficient.q))
    return sums
