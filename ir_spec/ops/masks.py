"""Masks of attention: which keys a query sees, and the number of pairs of queries and keys.

For `x` queries and `x` keys, at positions from 0:

| brackets                | query i sees key j if           | pairs                                |
|-------------------------|---------------------------------|--------------------------------------|
| nothing                 | always                          | x^2                                  |
| `causal`                | j <= i                          | x(x+1)/2                             |
| `causal, window = W`    | i - W < j <= i                  | m(m+1)/2 + (x-m)W, m = min(x, W)     |
| `window = W`            | i - W < j < i + W               | twice that, less x                   |
| `causal, chunk = C`     | j <= i, both in one block of C  | (x-r)(C+1)/2 + r(r+1)/2, r = x mod C |
| `chunk = C`             | both are in one block of C      | (x-r)C + r^2                         |
| `causal, documents = D` | j <= i, both in one of them     | the sum of l(l+1)/2 of their lengths |
| `documents = D`         | both are in one of them         | the sum of l^2                       |
| `causal, prefix = P`    | j <= i or j < P                 | x(x+1)/2 + p(p-1)/2, p = min(x, P)   |
| `causal, selected`      | j <= i, and j is among its N    | as those of a window of N            |
| `selected`              | j is among its N                | x min(x, N)                          |
| `rate = M`, of row j    | (j + 1) M <= i + 1              | M n(n-1)/2 + n(x%M + 1), n = [x/M]   |

The numbers of pairs follow from these definitions, row by row. With `t` < x keys, a causal mask
leaves min(i+1, t) keys to query i: the pairs of a window of `t`. Documents of equal lengths are
blocks; documents of different lengths add up to x, and no query sees two of them (packed sequences,
as in arXiv 2407.21783, section 3.2).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, ZERO, Expr, call, expand, same, total
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array
from stagec.ir.param import Param
from stagec.ir.types import Dim

#: The values of spans by name: one number, or the lengths of documents.
Sizes = Mapping[str, Sequence[int]]
CAUSAL = Param("causal", "flag", "mask the future")
SPANS = (
    Param("window", "size", "a query sees so many keys, up to its own position", least=1),
    Param("chunk", "size", "a query sees the keys in its block of so many positions", least=1),
    Param("prefix", "size", "every query sees so many first keys", least=1),
)
DOCUMENTS = Param(
    "documents", "sizes", "a query sees its document; these are their lengths", least=1
)
ALIBI = Param("alibi", "flag", "bias by distance, with the slopes of arXiv 2108.12409")
_CHOICES = (*(p.name for p in SPANS), DOCUMENTS.name, "selected")
#: Of keys that are rows of several tokens each; queries see those whose tokens are up to their own.
RATE = Param("rate", "size", "keys are rows of this number of tokens each", least=1)


def is_plain(op: Operation) -> bool:
    """Whether there is no mask, or only a causal one."""
    return not any(name in op.attrs for name in _CHOICES)


def alibi(ctx: NumericContext, heads: Dim, at: Sequence[int], of: Sequence[int]) -> Array:
    """The bias that `ALIBI` adds to the scores of queries at the positions `at` and keys at `of`,
    [H, S, T]: -2^(-8 h / H) times the distance, for those of the heads h from 1 to H that the rank
    has."""
    slopes = 2.0 ** (-8 * (np.asarray(ctx.positions(heads)) + 1) / ctx.size(heads.size))
    distance = np.asarray(at)[:, None] - np.asarray(of)[None, :]
    return -slopes[:, None, None] * np.abs(distance)


def misfits_of_mask(op: Operation) -> Iterator[str]:
    """The problems of the mask of an op."""
    given = [name for name in _CHOICES if name in op.attrs]
    if len(given) > 1:
        yield f"expects one of {', '.join(_CHOICES)}, found {' and '.join(given)}"
    if "prefix" in op.attrs and not op.flag("causal"):
        yield "expects 'causal' with 'prefix', since without a mask every query sees all keys"


def misfits_of_documents(op: Operation, rows: Expr, columns: Expr) -> Iterator[str]:
    """The problems of documents for `rows` queries and `columns` keys, which they must cover."""
    lengths = op.exprs(DOCUMENTS.name)
    if lengths and not (same(total(lengths), rows) and same(rows, columns)):
        actual = f"{columns} keys" if same(total(lengths), rows) else f"{total(lengths)} in all"
        rest = expand(rows - total(lengths[:-1]))
        yield (
            f"expects documents for the {rows} queries and keys, found {actual}: expected {rest} "
            "as the last dimension"
        )


def pairs(op: Operation, x: Expr, t: Expr, count: Expr | None = None) -> Expr:
    """The number of pairs that the mask leaves of `x` queries and `t` keys, from position 0;
    `count` is the number of selected keys of a query. After cached tokens, it is the number of
    pairs of all tokens minus those of the cached ones."""
    if "past" not in op.attrs:
        return expand(_pairs(op, x, t, count))
    past = op.expr("past")
    seen = past + x
    return expand(_pairs(op, seen, seen, count) - _pairs(op, past, past, count))


def _pairs(op: Operation, x: Expr, t: Expr, count: Expr | None) -> Expr:
    causal = op.flag("causal")
    if "window" in op.attrs:
        some = ramp(x, op.expr("window"))
        return some if causal else some * 2 - x
    if "chunk" in op.attrs:
        chunk = op.expr("chunk")
        rest = x % chunk
        if causal:
            return (x - rest) * (chunk + 1) / 2 + rest * (rest + 1) / 2
        return (x - rest) * chunk + rest * rest
    if DOCUMENTS.name in op.attrs:
        lengths = op.exprs(DOCUMENTS.name)
        return total(n * (n + 1) / 2 if causal else n * n for n in lengths)
    if "prefix" in op.attrs:
        first = call("min", [x, op.expr("prefix")])
        return x * (x + 1) / 2 + first * (first - 1) / 2
    if count is not None:
        return ramp(x, count) if causal else x * call("min", [t, count])
    if not causal:
        return x * t
    return x * (x + 1) / 2 if same(x, t) else ramp(x, t)


def ramp(x: Expr, most: Expr) -> Expr:
    """The sum of min(i + 1, most) over i below x."""
    short = call("min", [x, most])
    return short * (short + 1) / 2 + (x - short) * most


def whole_rows(tokens: Expr, rate: Expr) -> Expr:
    """The number of complete rows of `rate` tokens."""
    return tokens if tokens == ZERO or rate == ONE else (tokens - tokens % rate) / rate


def pairs_of_rows(op: Operation, x: Expr, most: Expr | None = None) -> Expr:
    """The number of pairs of `x` queries and rows of `rate` tokens, of which a query sees those
    whose tokens are up to its own, and `most` of them at most."""
    past, rate = op.expr("past", ZERO), op.expr("rate")
    return expand(_rows(past + x, rate, most) - _rows(past, rate, most))


def _rows(x: Expr, rate: Expr, most: Expr | None) -> Expr:
    """The sum of min(floor((i + 1) / rate), most) over i below x."""
    if most is not None:
        few = call("min", [x, most * rate - 1])
        return _rows(few, rate, None) + (x - few) * most
    whole = whole_rows(x, rate)
    return rate * whole * (whole - 1) / 2 + whole * (x % rate + 1)


def complete_rows(at: Array, rows: Array, rate: int) -> Array:
    """Whether the queries at these positions see each row, [s, r]."""
    return np.asarray((rows[None, :] + 1) * rate <= at[:, None] + 1)


def _numbers(op: Operation, name: str) -> Sequence[Expr]:
    return op.exprs(name) if name == DOCUMENTS.name else (op.expr(name),)


def seen(op: Operation, rows: Sequence[int], columns: Sequence[int], sizes: Sizes) -> Array:
    """The keys that the mask leaves to each query, [s, t], both given by their positions; `sizes`
    has the values of the spans. Selections are not included."""
    i, j = np.asarray(rows)[:, None], np.asarray(columns)[None, :]
    causal = op.flag("causal")
    visible = (i >= j) if causal else (i - j == i - j)
    if "window" in sizes:
        visible &= abs(i - j) < sizes["window"][0]
    if "chunk" in sizes:
        visible &= i // sizes["chunk"][0] == j // sizes["chunk"][0]
    if "prefix" in sizes:
        visible |= j < sizes["prefix"][0]
    if DOCUMENTS.name in sizes:
        ends = np.cumsum(sizes[DOCUMENTS.name])
        visible &= np.searchsorted(ends, i, "right") == np.searchsorted(ends, j, "right")
    return visible


def spans(op: Operation, ctx: NumericContext) -> Sizes:
    """The values of window, chunk, prefix and documents that an op states."""
    stated = [p.name for p in (*SPANS, DOCUMENTS) if p.name in op.attrs]
    return {name: [ctx.size(e) for e in _numbers(op, name)] for name in stated}
