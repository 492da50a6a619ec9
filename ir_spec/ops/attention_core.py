"""Operands, parameters, FLOPs and the numeric reference of all forms of fused attention.

The operands are queries, keys and values (the latter two packed in one value, or separate),
followed by those that flags name, in this order:

| flag       | operand                                                                            |
|------------|------------------------------------------------------------------------------------|
| `sinks`    | [H], a learned logit for each head in the denominator of the softmax (gpt-oss)     |
| `bias`     | [H, S, T], which is added to the scores (T5, arXiv 1910.10683)                     |
| `mask`     | [B, S, T], which is added to the scores of all heads, without a gradient           |
| `selected` | [B, S, N], the keys that each query sees, by their positions (arXiv 2512.02556)    |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr, call, evaluate, fraction, same, total
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.types import Dim, axis_size
from stagec.ir_spec.ops.cache_rows import AHEAD, PAST, first_key, past_of
from stagec.ir_spec.ops.masks import (
    ALIBI,
    CAUSAL,
    DOCUMENTS,
    SPANS,
    alibi,
    is_plain,
    misfits_of_documents,
    misfits_of_mask,
    pairs,
    seen,
    spans,
)

#: The shapes of operands that flags name.
_FURTHER: Mapping[str, str] = {"sinks": "(gr)", "bias": "(gr)st", "mask": "bst", "selected": "bsn"}
#: Of these the ones without a gradient.
_GIVEN = ("mask", "selected")
#: The parameters that a step of a ring shares with attention.
SCORES = (
    CAUSAL,
    *SPANS,
    Param("rsqrt", "size", "scores are divided by the square root of this (default K)"),
    Param("softcap", "size", "a bound c of the scores: c tanh(score / c)"),
    ALIBI,
    Param("sinks", "flag", "an operand [H], a logit for each head in the denominator"),
)
#: For attention without a gradient.
VALUES = Param("values", "size", "so many first columns of the keys are the values")
WHOLE = (
    DOCUMENTS,
    PAST,
    AHEAD,
    Param("bias", "flag", "an operand [H, S, T] is added to the scores"),
    Param("mask", "flag", "an operand [B, S, T] is added to the scores of all heads"),
    Param("selected", "flag", "an operand [B, S, N] says which keys each query sees"),
    Param("given_type", "flag", "model code has its softmax in the type of the scores"),
    Param("wide_scores", "flag", "model code has queries and keys in fp32 for its scores"),
    Param("made_mask", "flag", "model code makes a mask for kernels, although it is causal"),
    Param("by_head", "flag", "model code copies queries, heads before tokens"),
)

#: The orders of the positions of a split sequence on the ranks of a ring.
ORDERS = ("zigzag", "plain")


def further(op: Operation) -> list[str]:
    """The operands after keys and values, by the flags that name them."""
    return [name for name in _FURTHER if op.flag(name)]


def core_misfits(op: Operation, before: int) -> Iterator[str]:
    """The problems of operands and parameters; there are `before` operands before the keys."""
    more = further(op)
    count = len(op.operands) - before - len(more)
    packed = count == 1 and "values" not in op.attrs
    if count not in (1, 2):
        rest = "".join(f", then {name}" for name in more)
        yield f"expects q and kv, or q, k and v{rest}"
    elif packed and op.operands[before].tensor.shape[1] != 2:
        kv = op.operands[before].type
        yield f"dimension 1 of kv holds keys and values, expected a size of 2: {kv}"
    if "ring" in op.attrs and (whole := [p.name for p in WHOLE if p.name in op.attrs]):
        yield (
            f"is ring attention, which does not support {' or '.join(whole)}: expected stg.gather "
            "or stg.exchange"
        )
    yield from misfits_of_mask(op)
    if count in (1, 2):
        rows, columns = key_rows(op, before - 1)
        yield from misfits_of_documents(op, rows.size, columns.size)


def core_rule(
    op: Operation, text: str, before: int, factor: str, sizes: Sizes | None = None
) -> Rule:
    """Fill in a rule: keys and values in `{kv}`, with `factor` for the sequence, the head size of
    the values in `{v}`, further operands in `{more}`, and their gradients in `{grads}`. After
    `before` other operands, keys and values are one packed operand, or two, of which the values may
    have a different head size, or the values are columns of the keys."""
    more, within = further(op), "values" in op.attrs
    packed = len(op.operands) == before + 1 + len(more) and not within
    kv = f"bz{factor}gk" if packed else f"b{factor}gk" if within else f"b{factor}gk,b{factor}gv"
    keys = factor if "t" in factor else "t"
    shapes = {name: "," + _FURTHER[name].replace("t", keys) for name in more}
    grads = "".join(s for name, s in shapes.items() if name not in _GIVEN)
    v = "k" if packed else "v"
    filled = text.format(kv=kv, v=v, more="".join(shapes.values()), grads=grads)
    known = {**(sizes or {}), **({"v": op.expr("values")} if within else {})}
    return make_rule(filled, whole="zkvn", sizes=known)


# -- work ------------------------------------------------------------------------------------------


def all_pairs(n: Sizes) -> Expr:
    """The number of pairs of all queries and keys, including masked ones."""
    return n["s"] * n.get("t", n["s"])


def seen_keys(op: Operation, q: int) -> Expr:
    """The number of keys of a sequence that kernels process: further rows of a cache are empty, and
    if keys are selected, only these are read."""
    rows, columns = key_rows(op, q)
    most = [op.operands[-1].tensor.shape[-1]] if op.flag("selected") else []
    if "past" not in op.attrs:
        return columns.size
    if not same(columns.size, seen := op.expr("past") + rows.size):
        most.append(seen)
    return call("min", [columns.size, *most]) if most else columns.size


def unread_bytes(op: Operation) -> Expr:
    """The bytes of cached keys and values on a rank that are not read: if queries select keys, only
    these are read, on average over the ranks that have parts of the keys."""
    if "past" not in op.attrs or not op.flag("selected"):
        return ZERO
    rows, keys = key_rows(op, 0)
    chosen = rows.local * op.operands[-1].tensor.shape[-1]
    read = call("min", [keys.local, call("ceildiv", [chosen, axis_size(keys.axes)])])
    count = len(op.operands) - 1 - len(further(op))
    cached = total(v.tensor.local_bytes for v in op.operands[1 : 1 + count])
    return cached - cached * read / keys.local


def local_pairs(op: Operation, q: int, n: Sizes) -> Expr:
    """The number of pairs that the mask leaves on a rank; `q` is the index of the queries. If these
    are split over ranks, and keys are not, it is the mean over the ranks, rounded up."""
    rows, columns = key_rows(op, q)
    if is_plain(op) and not op.flag("causal"):
        return all_pairs(n)
    square = same(rows.size, columns.size) and same(n.get("t", n["s"]), rows.size)
    if "past" not in op.attrs and is_plain(op) and square:
        return n["s"] * (rows.size + 1) / 2
    count = op.operands[-1].tensor.shape[-1] if op.flag("selected") else None
    whole = pairs(op, rows.size, columns.size, count)
    ranks = rows.size / n["s"]
    if "past" in op.attrs:
        ranks = ranks * columns.size / n["t"]
    return whole if ranks == 1 else call("ceildiv", [whole, ranks])


def key_rows(op: Operation, q: int) -> tuple[Dim, Dim]:
    """The dimensions of the sequences of queries and keys; `q` is the index of the queries, which
    keys follow."""
    k = op.operands[q + 1].tensor.dims
    return op.operands[q].tensor.dims[1], k[2 if len(k) == 5 else 1]


# -- numeric reference -----------------------------------------------------------------------------


@dataclass
class Given:
    """The operands from the queries on, for the numeric reference. Heads form groups that share
    keys."""

    q: Array
    k: Array
    v: Array
    packed: bool
    more: Mapping[str, Array] = field(default_factory=dict[str, Array])

    @property
    def heads(self) -> tuple[int, int]:
        """The number of groups, and of heads per group."""
        return self.k.shape[2], self.q.shape[2] // self.k.shape[2]

    def by_group(self, x: Array) -> Array:
        """[b, s, h, k] as [b, s, g, r, k]."""
        return x.reshape(*x.shape[:2], *self.heads, x.shape[-1])


def given(op: Operation, args: Sequence[Array], ctx: NumericContext) -> Given:
    """The operands of any form of attention."""
    names = further(op)
    count = len(args) - len(names)
    more = dict(zip(names, args[count:], strict=True))
    if "values" in op.attrs:
        return Given(args[0], args[1], args[1][..., : ctx.size(op.expr("values"))], False, more)
    if count == 2:
        return Given(args[0], args[1][:, 0], args[1][:, 1], True, more)
    return Given(args[0], args[1], args[2], False, more)


@dataclass(frozen=True)
class Scores:
    """Scores [b, g, r, s, t], -inf for masked keys, and their divisor; `slope` is their derivative
    with respect to the scores before the soft cap."""

    values: Array
    divisor: float
    slope: Array


def scores_of(op: Operation, ctx: NumericContext, keys: NumericContext, q: int, x: Given) -> Scores:
    """The scores; `keys` is the rank that keys come from, `q` the index of the queries."""
    rows, columns = key_rows(op, q)
    at, of = ctx.positions(rows), keys.positions(columns)
    if "past" in op.attrs:
        past, first = ctx.size(past_of(op)), ctx.size(first_key(op, rows.size, columns.size))
        at, of = [p + past for p in at], [p + first for p in of]
    return scores_between(op, ctx, at, of, op.operands[q].tensor.dims[2], x)


def scores_between(
    op: Operation, ctx: NumericContext, at: Sequence[int], of: Sequence[int], heads: Dim, x: Given
) -> Scores:
    """The scores of queries at some positions and keys at others; `heads` is the dimension of the
    queries' heads."""
    size = fraction_of(op, "rsqrt", ctx) if "rsqrt" in op.attrs else x.q.shape[-1]
    divisor = float(np.sqrt(float(size)))
    scores = np.einsum("bsgrk,btgk->bgrst", x.by_group(x.q), x.k) / divisor
    slope = np.ones_like(scores)
    if "softcap" in op.attrs:
        cap = float(fraction_of(op, "softcap", ctx))
        part = np.tanh(scores / cap)
        scores, slope = cap * part, 1 - part * part
    if op.flag("alibi"):
        bias = alibi(ctx, heads, at, of)
        scores = scores + bias.reshape(*x.heads, *bias.shape[1:])
    if "bias" in x.more:
        scores = scores + x.more["bias"].reshape(*x.heads, *scores.shape[-2:])
    if "mask" in x.more:
        scores = scores + x.more["mask"][:, None, None]
    visible = seen(op, at, of, spans(op, ctx))
    if "selected" in x.more:
        chosen = (x.more["selected"][..., None] == np.asarray(of)).any(-2)
        visible = (visible & chosen)[:, None, None]
    return Scores(np.where(visible, scores, -np.inf), divisor, slope)


def fraction_of(op: Operation, name: str, ctx: NumericContext) -> float:
    """The number of a size, which may be a constant fraction."""
    value = op.expr(name)
    return float(evaluate(value, ctx.env)) if value.symbols else float(fraction(value))


def log_sum_exp(scores: Array) -> Array:
    """The log-sum-exp of each row, -inf if all keys are masked."""
    with np.errstate(divide="ignore"):
        top = np.maximum(scores.max(-1, keepdims=True), np.finfo(float).min)
        return (np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top)[..., 0]


def forward(x: Given, scores: Scores) -> list[Array]:
    """The output and its log-sum-exp [b, h, s]; 0 and -inf for rows without visible keys."""
    lse = log_sum_exp(scores.values)
    if "sinks" in x.more:
        lse = np.logaddexp(lse, x.more["sinks"].reshape(*x.heads, 1))
    p = np.exp(scores.values - np.maximum(lse, np.finfo(float).min)[..., None])
    out = np.einsum("bgrst,btgv->bsgrv", p, x.v).reshape(*x.q.shape[:3], x.v.shape[-1])
    return [out, lse.reshape(x.q.shape[0], x.q.shape[2], x.q.shape[1])]


def backward(x: Given, scores: Scores, dy: Array, y: Array, lse: Array) -> list[Array]:
    """The gradients (arXiv 2205.14135, algorithm 4) of q, keys and values, and of sinks and bias. A
    sink has a share of the softmax but adds nothing to the result, so its gradient is minus this
    share times the sum of dy * y."""
    b, s = x.q.shape[:2]
    lse = np.maximum(lse.reshape(b, *x.heads, s), np.finfo(float).min)
    p = np.exp(scores.values - lse[..., None])
    dyg = x.by_group(dy)
    delta = np.moveaxis(x.by_group((dy * y).sum(-1)[..., None])[..., 0], 1, 3)
    dv = np.einsum("bgrst,bsgrv->btgv", p, dyg)
    added = p * (np.einsum("bsgrv,btgv->bgrst", dyg, x.v) - delta[..., None])
    ds = added * scores.slope / scores.divisor
    dq = np.einsum("bgrst,btgk->bsgrk", ds, x.k).reshape(x.q.shape)
    dk = np.einsum("bgrst,bsgrk->btgk", ds, x.by_group(x.q))
    grads = [dq, np.stack([dk, dv], axis=1)] if x.packed else [dq, dk, dv]
    if "sinks" in x.more:
        share = np.exp(x.more["sinks"].reshape(*x.heads, 1) - lse)
        grads.append(-(share * delta).sum((0, 3)).reshape(-1))
    if "bias" in x.more:
        grads.append(added.sum(0).reshape(x.more["bias"].shape))
    return grads
