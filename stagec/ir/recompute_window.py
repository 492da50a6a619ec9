"""Recomputation in some iterations only: the iterations of a backward repeat that replay forward.

A repeat has `replay_first = N` (the first N layers) or `replay_every = N` (every N-th layer);
without either, all iterations replay. Layers are counted from 0 in forward order, over the repeat
or over the whole stack if it has several kinds of layers.
"""

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, call, const
from stagec.ir.layers import order_of, place_of

FIRST, EVERY = "replay_first", "replay_every"


def is_partial(repeat: Operation | None) -> bool:
    """Whether only some iterations of a repeat recompute."""
    return repeat is not None and (FIRST in repeat.attrs or EVERY in repeat.attrs)


def replays(repeat: Operation, index: int) -> bool:
    """Whether the iteration for slice `index` recomputes."""
    if not is_partial(repeat):
        return True
    place = place_of(repeat, index)
    if FIRST in repeat.attrs:
        return place < repeat.integer(FIRST)
    return place % repeat.integer(EVERY) == repeat.integer(EVERY) - 1


def replayed(repeat: Operation) -> Expr:
    """The number of iterations that recompute."""
    count, order = repeat.expr("count"), order_of(repeat)
    if order is not None and is_partial(repeat):
        number = order.counts[repeat.symbol or ""]
        return const(sum(replays(repeat, i) for i in range(number)))
    if FIRST in repeat.attrs:
        return call("min", [count, repeat.expr(FIRST)])
    if EVERY in repeat.attrs:
        every = const(repeat.integer(EVERY))
        return (count - count % every) / every
    return count


def stashed(repeat: Operation) -> Expr:
    """The number of iterations that use the stash instead of recomputing."""
    return repeat.expr("count") - replayed(repeat)
