"""Index rules: how the dimensions of an op's operands and results correspond.

A rule is written like an einsum, `bshk,hkd->bsd`, over one-letter *factors*. A dimension may be a
product of factors, major first, in parentheses: `bs(gr)k,bztgk->bs(gr)k`. All code about placement,
cost or shape reads rules, not names of ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from stagec.ir.expr import Expr
from stagec.ir.types import Load, Routed

_LONGEST = 1 << 12
Group: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[Group, ...]


class RuleSyntaxError(ValueError):
    """The text is not an index rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of each operand and result dimension, and the ways in which they may be split.

    - `whole` factors must not be split. An operand that is split along an `exchanged` factor, which
      is whole too, gets this split along another dimension instead of being gathered.
    - `special` factors may be split, but then the op has to be rewritten (`OpDef.partition`). If
      they are `summed` too, results without them are partial sums then.
    - Along `gathered` factors an operand may be split over more axes than the result: the op
      gathers the operand itself while it computes.
    - Partial sums may pass if *all* operands in `linear` are partial over the same axes, or from
      each operand in `each` by itself, if a strategy defers these axes.
    - A dimension of a `numbered` factor and others has rows that an op counts within its part of
      the factor: all ops on these rows need the same split of it.
    - `reduction` is the kind of partial value that a split contracted factor leaves.
    - `sizes` are factors that appear in no operand, `loads` factors whose rows differ between
      ranks, `routed` factors with routed rows.
    """

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    whole: frozenset[str] = frozenset()
    exchanged: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()
    linear: frozenset[int] = frozenset()
    each: frozenset[int] = frozenset()
    numbered: frozenset[str] = frozenset()
    reduction: str = "sum"
    sizes: Mapping[str, Expr] = field(default_factory=dict[str, Expr], hash=False)
    loads: Mapping[str, Load] = field(default_factory=dict[str, Load], hash=False)
    routed: Mapping[str, Routed] = field(default_factory=dict[str, Routed], hash=False)

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors, in order of appearance."""
        return _factors((*self.operands, *self.results))

    def contracted(self, result: int) -> frozenset[str]:
        """Factors that are not in result `result`."""
        return frozenset(self.factors).difference(_factors((self.results[result],)))

    def reduced(self, result: int) -> frozenset[str]:
        """Factors whose split makes result `result` partial."""
        return self.contracted(result) - (self.special - self.summed)

    def occurrences(self, factor: str) -> Iterator[tuple[int, int]]:
        """The (operand, dimension) pairs in which the factor appears."""
        for i, shape in enumerate(self.operands):
            for d, group in enumerate(shape):
                if factor in group:
                    yield i, d


@lru_cache(maxsize=4096)
def _factors(shapes: tuple[Shape, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f for shape in shapes for group in shape for f in group))


def make_rule(
    text: str,
    *,
    whole: str = "",
    exchanged: str = "",
    special: str = "",
    summed: str = "",
    gathered: str = "",
    linear: Iterable[int] = (),
    each: Iterable[int] = (),
    numbered: str = "",
    reduction: str = "sum",
    sizes: Mapping[str, Expr] | None = None,
    loads: Mapping[str, Load] | None = None,
    routed: Mapping[str, Routed] | None = None,
) -> Rule:
    """A rule from its text, `operand,operand->result,result`.

    Raises `RuleSyntaxError`, also for a gathered factor that is not by itself a dimension of a
    result.
    """
    factors = (whole, exchanged, special, summed, gathered, numbered)
    rule = _stated(text, factors, tuple(linear), tuple(each), reduction)
    if not (sizes or loads or routed):
        return rule
    return replace(rule, sizes=sizes or {}, loads=loads or {}, routed=routed or {})


@lru_cache(maxsize=4096)
def _stated(
    text: str,
    factors: tuple[str, str, str, str, str, str],
    linear: tuple[int, ...],
    each: tuple[int, ...],
    reduction: str,
) -> Rule:
    """The rule without sizes and loads; equal rules are one object."""
    whole, exchanged, special, summed, gathered, numbered = factors
    operands, results = parse_rule(text)
    groups = {group for shape in (*operands, *results) for group in shape}
    for factor in gathered:
        alone = all(factor not in group for group in groups - {(factor,)})
        if not alone or not any((factor,) in shape for shape in results):
            raise RuleSyntaxError(
                f"'{text}': '{factor}' is gathered, so it must be a dimension of a result, alone"
            )
    return Rule(
        operands,
        results,
        frozenset(whole + exchanged),
        frozenset(exchanged),
        frozenset(special),
        frozenset(summed),
        frozenset(gathered),
        frozenset(linear),
        frozenset(each),
        frozenset(numbered),
        reduction,
    )


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """The shapes on both sides of the arrow. Raises `RuleSyntaxError`."""
    if len(text) > _LONGEST:
        raise RuleSyntaxError(f"a rule of {len(text)} characters is too long")
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleSyntaxError(f"'{text}' has no '->'")
    return tuple(map(_shape, left.split(","))), tuple(map(_shape, right.split(",")))


def _shape(text: str) -> Shape:
    groups: list[Group] = []
    rest = text.strip()
    while rest:
        if rest[0] == "(":
            inner, closed, rest = rest[1:].partition(")")
            if not closed or not inner.isalpha():
                raise RuleSyntaxError(f"'{text}': expected letters and ')' after '('")
            groups.append(tuple(inner))
        elif rest[0].isascii() and rest[0].isalpha():
            groups.append((rest[0],))
            rest = rest[1:]
        else:
            raise RuleSyntaxError(f"'{text}': expected a letter, found '{rest[0]}'")
    letters = [f for g in groups for f in g]
    if len(letters) != len(set(letters)):
        raise RuleSyntaxError(f"'{text}': a letter stands twice")
    return tuple(groups)


def letters(count: int) -> str:
    """`count` letters, for rules of any rank."""
    return "abcdefghijklmnopqrstuvwxyz"[:count]


def shape_text(shape: Shape) -> str:
    """The text of the factors of one operand or result."""
    return "".join(g[0] if len(g) == 1 else f"({''.join(g)})" for g in shape)
