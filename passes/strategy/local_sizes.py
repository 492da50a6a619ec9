"""Sizes per rank, before values are split."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from stagec.api import Expr, Module, Strategy, evaluate
from stagec.ir.queries import ask


@dataclass(frozen=True, slots=True)
class _HasParts:
    """Query: whether a size that is split over axes is this number on a rank."""

    size: Expr
    axes: tuple[str, ...]
    number: int

    def __call__(self, values: Mapping[str, int]) -> bool:
        return evaluate(self.size, values) // prod(values[a] for a in self.axes) == self.number


def is_on_rank(
    module: Module, strategy: Strategy, size: Expr, number: int = 1, *, whole: bool = False
) -> bool:
    """Whether a size is this number on a rank, as the strategy splits its symbols, or as a `whole`;
    False if it has no value."""
    rules = [rule for rule in strategy.splits if size.symbols & {*rule.dims} and not whole]
    axes, env = tuple(a for rule in rules for a in rule.over), module.env
    known = size.symbols <= env.keys() and env.keys() >= {*axes}
    return known and ask(_HasParts(size, axes, number), env)
