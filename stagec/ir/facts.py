"""The assumptions of a module about its sizes, and the divisibility that follows from them.

Owns `Relation` (`S % tp == 0`, `B >= 1`) and `Facts`, which decides divisibility from relations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combinations
from operator import eq, ge, le
from typing import Literal

from stagec.ir.expr import (
    ONE,
    Expr,
    as_expr,
    const,
    evaluate,
    product_is_integral,
    substitute,
    symbol,
)
from stagec.ir.queries import Divides, TrackedValues, ask, plain

Comparison = Literal["==", ">=", "<="]
_MAX_COMBINATIONS = 256


@dataclass(frozen=True, slots=True)
class Relation:
    """`left op right` between two sizes."""

    left: Expr
    op: Comparison
    right: Expr
    modulus: Expr | None = None  # `left % modulus op right`

    def __str__(self) -> str:
        left = str(self.left)
        if self.modulus is not None:
            left = f"{_operand(self.left)} % {_operand(self.modulus)}"
        return f"{left} {self.op} {self.right}"

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols on both sides."""
        inner = self.modulus.symbols if self.modulus is not None else frozenset[str]()
        return self.left.symbols | self.right.symbols | inner

    def holds(self, env: Mapping[str, int]) -> bool:
        """Whether the relation is true for these values, which all symbols need; noted as a
        query."""
        return ask(self, env)

    def __call__(self, env: Mapping[str, int]) -> bool:
        """The answer of `holds`, without a note."""
        left, right = evaluate(self.left, env), evaluate(self.right, env)
        if self.modulus is not None:
            left %= evaluate(self.modulus, env)
        return bool({"==": eq, ">=": ge, "<=": le}[self.op](left, right))

    def substitute(self, env: Mapping[str, Expr]) -> Relation:
        """The relation with symbols replaced."""
        modulus = substitute(self.modulus, env) if self.modulus is not None else None
        return Relation(substitute(self.left, env), self.op, substitute(self.right, env), modulus)


def _operand(value: Expr) -> str:
    text = str(value)
    return f"({text})" if any(c in text for c in "+-*/% ") and not text.isalnum() else text


def divisible(left: Expr, right: Expr) -> Relation:
    """`left % right == 0`."""
    return Relation(left, "==", as_expr(0), right)


@lru_cache(maxsize=64)
def _proofs(relations: tuple[Relation, ...]) -> dict[tuple[Expr, Expr], bool]:
    """A cache of whether (divisor, size) divides for all values. It depends on these relations
    only, so modules of one model share it."""
    return {}


class Facts:
    """Decides from the relations of a module whether one size divides another.

    `env` are known values; divisibility of these numbers counts as well.
    """

    def __init__(
        self, relations: Iterable[Relation] = (), env: Mapping[str, int] | None = None
    ) -> None:
        self._values = env or {}
        self._env = {name: const(value) for name, value in plain(self._values).items()}
        self._bound: Facts | None = None
        self._relations: list[Relation] = []
        self._quotients: dict[str, list[Expr]] = {}
        self._known: set[tuple[Expr, Expr]] = set()
        self._inverses: dict[Expr, None] = {}
        self._cache: dict[tuple[Expr, Expr], bool] = {}
        self._proofs: dict[tuple[Expr, Expr], bool] | None = None
        for relation in relations:
            self.add(relation)

    def add(self, relation: Relation) -> None:
        """Assume one more relation. Only `a % b == 0` is used for deciding divisibility, and
        `a == b` as that in both directions."""
        self._relations.append(relation)
        self._cache.clear()
        self._proofs = None
        self._bound = None
        left, right, modulus = relation.left, relation.right, relation.modulus
        if relation.op != "==" or left == 0 or modulus == 0:
            return
        if modulus is None and right != 0:
            self._know(left, right)
            self._know(right, left)
        if modulus is None or right != 0:
            return
        self._know(left, modulus)
        name = left.symbol_name
        if name:  # name = modulus * a new integer, with a name that no text can contain
            fresh = symbol(f"{name}/{len(self._quotients.get(name, []))}")
            self._quotients.setdefault(name, []).append(modulus * fresh)

    def _know(self, size: Expr, divisor: Expr) -> None:
        self._known.add((size, divisor))
        self._inverses[divisor / size] = None

    @property
    def relations(self) -> tuple[Relation, ...]:
        """All assumptions, in order."""
        return tuple(self._relations)

    def divides(self, divisor: Expr, size: Expr) -> bool:
        """Whether `size / divisor` is known to be an integer."""
        key = (divisor, size)
        if key not in self._cache:
            self._cache[key] = self._decide(divisor, size)
        return self._cache[key]

    def question(self, divisor: Expr, size: Expr) -> bool | Divides:
        """The answer of `divides` if it holds for all values, or is decided without values; else
        the query for the values, which is not noted."""
        known = (divisor.symbols | size.symbols) <= self._env.keys()
        if self._proven(divisor, size):
            return True
        return Divides(divisor, size) if known else self.divides(divisor, size)

    def _decide(self, divisor: Expr, size: Expr) -> bool:
        return self._proven(divisor, size) or self._decide_with_values(divisor, size)

    def _proven(self, divisor: Expr, size: Expr) -> bool:
        """Whether the relations imply it for all values."""
        if self._proofs is None:
            self._proofs = _proofs(self.relations)
        key = divisor, size
        if key not in self._proofs:
            self._proofs[key] = self._prove(divisor, size)
        return self._proofs[key]

    def _prove(self, divisor: Expr, size: Expr) -> bool:
        if divisor == 1 or (size, divisor) in self._known:
            return True
        inverse = ONE / divisor
        if any(product_is_integral(size, r * inverse) for r in (ONE, *self._inverses)):
            return True  # r is an integer by assumption
        names = sorted(size.symbols & self._quotients.keys())
        options = [[None, *self._quotients[n]] for n in names]
        for tried, choice in enumerate(combinations(*options)):
            if tried > _MAX_COMBINATIONS:
                return False
            env = {n: c for n, c in zip(names, choice, strict=True) if c is not None}
            if env and product_is_integral(substitute(size, env), inverse):
                return True
        return False

    def _decide_with_values(self, divisor: Expr, size: Expr) -> bool:
        used = divisor.symbols | size.symbols
        if not used & self._env.keys():
            return False
        if isinstance(self._values, TrackedValues) and used <= self._env.keys():
            return ask(Divides(divisor, size), self._values)
        try:
            if self._bound is None:
                self._bound = Facts(r.substitute(self._env) for r in self._relations)
            return self._bound.divides(substitute(divisor, self._env), substitute(size, self._env))
        except ZeroDivisionError:
            return False
