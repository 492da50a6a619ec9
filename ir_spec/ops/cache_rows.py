"""Rows of caches, which serving steps keep for the tokens of a sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, ZERO, Expr, call, const, same
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import AppendsRows, InPlace

#: For ops that depend on positions: those of a step begin after the cached tokens.
PAST = Param("past", "size", "tokens of each sequence that are cached before (default 0)")
#: For ops that read rows of caches.
AHEAD = Param("ahead", "size", "rows that a cache keeps for tokens of further steps (default 0)")


def past_of(op: Operation) -> Expr:
    """The number of tokens that are cached before the step."""
    return op.expr("past", ZERO)


def first_key(op: Operation, queries: Expr, keys: Expr) -> Expr:
    """The position of the first row of a cache. Its rows are the last ones of `past` tokens, the
    new ones and those `ahead`; further rows at the end are empty."""
    tokens = past_of(op) + queries + ahead_of(op)
    return ZERO if same(tokens, keys) else call("max", [tokens - keys, ZERO])


def ahead_of(op: Operation) -> Expr:
    """The number of rows after those of the step."""
    return op.expr("ahead", ZERO)


class Append(OpDef):
    """Writes the rows of new tokens after the cached ones, in place.

    Along dimension `dim`, the cache has the last of the `past` tokens, the new ones and rows for
    those `ahead`, in the order of positions; further rows are empty. The dimension may be split:
    each rank writes its own rows. Only the new rows are read and written; no FLOPs.
    """

    name = "stg.append"
    operands = ("cache", "new")
    traits = (InPlace(operands=(0,)), AppendsRows())
    params = (
        Param("dim", "int", "the dimension of tokens (default 1)"),
        PAST,
        AHEAD,
        Param("span", "size", "a query sees so many keys up to its own: no more stay cached"),
        Param("rate", "size", "tokens per row (default 1); `past` is a number of rows", least=1),
        Param("page", "int", "rows are kept in pages of so many tokens (default 1)"),
    )
    example = "%keys = stg.append(%q, %q) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        d, rank = op.integer("dim", 1), op.operands[0].tensor.rank
        text = letters(rank)
        if not {"past"} & op.attrs.keys():
            return make_rule(f"{text},{text}->{text}")
        new = letters(rank + 1)[-1]
        rows = text[:d] + new + text[d + 1 :]
        return make_rule(f"{text},{rows}->{text}", whole=new)

    def verify(self, op: Operation) -> Iterator[str]:
        cache, new = (v.tensor for v in op.operands)
        d = op.integer("dim", 1)
        if not 0 <= d < cache.rank:
            yield f"works along dimension {d}, but the cache is {cache}"
        if cache.dtype != new.dtype:
            yield f"expects rows of {cache.dtype}, as the cache has, found {new}"

    def bytes_touched(self, op: Operation) -> Expr:
        return op.operands[1].tensor.local_bytes * 2

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        cache, new = args
        d = op.integer("dim", 1)
        if "past" not in op.attrs:
            return [new]
        rows, new_rows = (v.tensor.dims[d] for v in op.operands)
        count = new.shape[d]
        first = ctx.size(first_key(op, new_rows.size, rows.size))
        at = np.asarray(ctx.positions(rows)) + first - ctx.size(past_of(op))
        mine = (at >= 0) & (at < count)
        out = np.moveaxis(cache.copy(), d, 0)
        out[mine] = np.moveaxis(new, d, 0)[at[mine]]
        return [np.moveaxis(out, 0, d)]


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The dimension of tokens of a cache, the number of keys that a query sees (None for all), the
    tokens per page, and those of a row."""

    dim: int
    span: Expr | None
    page: int
    rate: Expr

    def cached(self, tokens: Expr) -> Expr:
        """The number of rows that a sequence of `tokens` tokens keeps, a fraction if rows have
        several tokens."""
        rows = tokens if self.span is None else call("min", [tokens, self.span])
        return rows / self.rate

    def paged(self, rows: Expr) -> Expr:
        """A number of rows, rounded up to whole rows, and to whole pages."""
        if self.page == 1 and self.rate == ONE:
            return rows
        pages = call("ceildiv", [rows * self.rate, const(self.page)]) * self.page
        return call("ceildiv", [pages, self.rate])


def rows_of(cache: Value) -> CachedRows | None:
    """The rows of an argument that is a cache, from the op that appends them; None if no op
    does."""
    for user, index in cache.uses:
        if isinstance(user.definition, Append) and index == 0:
            span = user.expr("span") if "span" in user.attrs else None
            page, rate = user.integer("page", 1), user.expr("rate", ONE)
            return CachedRows(user.integer("dim", 1), span, page, rate)
        if user.region is not None and index < len(user.region.args):
            inner = user.region.args[index]
            rows = rows_of(inner)
            if rows is not None:
                return replace(rows, dim=rows.dim + cache.tensor.rank - inner.tensor.rank)
    return None
