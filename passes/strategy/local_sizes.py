"""Sizes per rank, before values are split."""

from math import prod

from stagec.api import Expr, Module, Strategy, evaluate
from stagec.ir.queries import plain


def on_rank(module: Module, strategy: Strategy, size: Expr) -> int | None:
    """A size per rank, as the strategy splits its symbols; None if it has no value."""
    axes = [a for rule in strategy.splits if size.symbols & {*rule.dims} for a in rule.over]
    parts = [module.mesh.sizes.get(a) if module.mesh is not None else None for a in axes]
    env = plain(module.env)
    if None in parts or not size.symbols <= env.keys():
        return None
    return evaluate(size, env) // prod(p for p in parts if p is not None)
