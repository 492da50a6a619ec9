"""Experts that get tokens: the weights that a product of experts reads, and its number of groups.

A router that loads E experts evenly assigns k of them to each token, uniformly and independently.
An expert gets none of T tokens with probability (1 - k/E)^T, so a kernel reads the share 1 - (1 -
k/E)^T of the weights of experts on average. If tokens choose some experts more often
(`stg.routing[popularity = spread]`), the probability p of an expert is distributed by Beta(1, b)
with b = E/k - 1, and E[(1 - p)^T] = b / (b + T): the share is q = T k / (E - k + T k). Ranks with n
experts each then reach Binomial(n, q) of them, and all wait for the rank that reaches most, whose
weights count: the mean of the maximum of E / n such numbers. The numbers of the ranks are
correlated, but equally for all pairs, which does not change the distance of the maximum from the
mean. If experts have loads of their own (`stg.expert_load`), the share follows from their rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, Expr, call, maximum, product
from stagec.ir.rule import Rule, Shape
from stagec.ir.types import Dim, Load, Routed, TensorType, bytes_of

Sizes = Mapping[str, Expr]


@dataclass(frozen=True)
class ExpertWeights:
    """The operands of an op with one part per expert and without rows of tokens.

    `experts` is the factor of experts, `rows` are the factors of the rows of one expert.
    """

    operands: tuple[int, ...]
    experts: str
    rows: tuple[str, ...]
    routed: Routed | None
    load: Load | None

    def read(self, type_: TensorType, n: Sizes) -> Expr:
        """The bytes of an operand that a rank reads, to the nearest integer; `n` are local
        sizes."""
        if self.load is not None:
            return bytes_of(type_.local_elements * self.load.used, type_.dtype)
        return self._reached(type_.local_bytes, n)

    def occupied(self, n: Sizes) -> Sizes:
        """The local sizes, where only experts that get tokens count (at least one), with their
        rows."""
        all_of = n[self.experts]
        some = all_of * self.load.used if self.load is not None else self._reached(all_of, n)
        groups, row = maximum([some, ONE]), self.rows[0]
        return {**n, self.experts: groups, row: n[row] * all_of / groups}

    def _reached(self, whole: Expr, n: Sizes) -> Expr:
        if self.routed is None:
            return whole
        rows = product(n[f] for f in self.rows) * self.routed.of
        if self.routed.spread:
            own, every = n[self.experts], self.routed.of
            most = every - self.routed.k + rows
            if own == every:
                return call("ceildiv", [whole * rows, most])
            return call("fullest", [whole, rows, most, own, every / own])
        tokens = rows / self.routed.k
        return call("reached", [whole, self.routed.of, self.routed.k, tokens])


def expert_weights(op: Operation, rule: Rule) -> ExpertWeights | None:
    """The weights of experts among the operands of an op with inferred results; None if it has
    none, or no routed rows."""
    operands = tuple(zip(op.operands, rule.operands, strict=True))
    results = tuple(zip(op.results, rule.results, strict=False))
    dealt = [(v.tensor, shape) for v, shape in (*operands, *results) if _dealt(v.tensor)]
    if not dealt:
        return None
    experts, mark = _experts(*dealt[0]), _dealt(dealt[0][0])
    common = frozenset[str].intersection(*(_factors(shape) for _, shape in dealt))
    others = {i: _factors(s) for i, (v, s) in enumerate(operands) if not _dealt(v.tensor)}
    weights = [i for i, factors in others.items() if experts in factors and common - factors]
    if experts is None or mark is None or not weights:
        return None
    rows = [f for f in rule.factors if f in common and not any(f in others[i] for i in weights)]
    return ExpertWeights(tuple(weights), experts, tuple(rows), mark.routed, mark.load)


def _dealt(type_: TensorType) -> Dim | None:
    """The dimension with routed rows, or None."""
    return next((d for d in type_.dims if d.routed is not None or d.load is not None), None)


def _experts(type_: TensorType, shape: Shape) -> str | None:
    """The factor of the experts of a value with routed rows; None if they share a dimension."""
    dim = _dealt(type_)
    for d, group in zip(type_.dims, shape, strict=True):
        of_load = dim is not None and dim.load is not None and d.size.symbol_name == dim.load.of
        if of_load or (dim is not None and dim.routed is not None and d.size == dim.routed.of):
            return group[0] if len(group) == 1 else None
    return None


def _factors(shape: Shape) -> frozenset[str]:
    return frozenset(f for group in shape for f in group)
