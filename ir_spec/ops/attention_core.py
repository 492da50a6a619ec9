"""What all forms of fused attention share: operands, FLOPs and the numeric reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, product
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.types import Dim
from stagec.ir_spec.ops.norm import visible

CAUSAL = Param("causal", "flag", "mask the future")


def core_flops(n: Sizes, keys: int, values: int) -> Expr:
    """2 FLOPs per multiply-add of products with the whole score matrix of these queries and keys:
    `keys` of them with head size K, `values` with that of the values."""
    scores = product(n[f] for f in "bgrs") * n.get("t", n["s"])
    return scores * (n["k"] * keys + n.get("v", n["k"]) * values) * 2


def core_kernel(kind: str, dtype: str, n: Sizes, keys: Expr, causal: bool) -> KernelShape:
    """The kernel of attention with so many keys. Its FLOPs are `2 * batch * heads * queries * keys`
    times `qk + v`, backward times `3*qk + 2*v`; half of that if it is causal."""
    heads = n["g"] * n["r"]
    extents = (n["b"], heads, n["g"], n["s"], keys, n["k"], n.get("v", n["k"]))
    return KernelShape(kind, dtype, extents, causal)


def core_rule(op: Operation, text: str, before: int, factor: str, special: str = "") -> Rule:
    """The rule with keys and values in `{kv}`, split along the sequence as `factor`, and the head
    size of the values in `{v}`. They are one packed operand after `before` others, or two, of which
    the values may have a head size of their own."""
    packed = len(op.operands) == before + 1
    v = "k" if packed else "v"
    kv = f"bz{factor}gk" if packed else f"b{factor}gk,b{factor}gv"
    return make_rule(text.format(kv=kv, v=v), whole="zkv", special=special)


def unpack(args: Sequence[Array]) -> tuple[Array, Array, Array]:
    """q, k and v of either form."""
    if len(args) == 2:
        return args[0], args[1][:, 0], args[1][:, 1]
    return args[0], args[1], args[2]


def scores_of(q: Array, k: Array) -> Array:
    """q k^T / sqrt(K), [b, g, r, s, t]."""
    b, s, h, d = q.shape
    g = k.shape[2]
    return np.einsum("bsgrk,btgk->bgrst", q.reshape(b, s, g, h // g, d), k) / np.sqrt(d)


def key_rows(op: Operation, q: int) -> tuple[Dim, Dim]:
    """The dimensions along which queries and keys lie; `q` is the operand with the queries, which
    keys follow."""
    k = op.operands[q + 1].tensor.dims
    return op.operands[q].tensor.dims[1], k[2 if len(k) == 5 else 1]


def masked(
    op: Operation, ctx: NumericContext, keys: NumericContext, q: int, scores: Array
) -> Array:
    """Scores with -inf where a causal mask hides the key; `keys` is the rank they are of, `q` the
    operand with the queries."""
    if not op.flag("causal"):
        return scores
    rows, columns = key_rows(op, q)
    return np.where(visible(ctx.positions(rows), keys.positions(columns)), scores, -np.inf)


def log_sum_exp(scores: Array) -> Array:
    """Of each row, -inf where nothing is seen."""
    with np.errstate(divide="ignore"):
        top = np.maximum(scores.max(-1, keepdims=True), np.finfo(float).min)
        return (np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top)[..., 0]


def forward(q: Array, v: Array, scores: Array) -> list[Array]:
    """The output and its log-sum-exp [b, h, s]; rows that see nothing give 0 and -inf."""
    lse = log_sum_exp(scores)
    p = np.exp(scores - np.maximum(lse, np.finfo(float).min)[..., None])
    out = np.einsum("bgrst,btgv->bsgrv", p, v).reshape(*q.shape[:3], v.shape[-1])
    return [out, lse.reshape(q.shape[0], q.shape[2], q.shape[1])]


def backward(args: Sequence[Array], scores: Array) -> list[Array]:
    """The gradients from dy, y, lse, q and keys and values (arXiv 2205.14135, algorithm 4)."""
    dy, y, lse, q = args[:4]
    _, k, v = unpack(args[3:])
    b, s, h, d = q.shape
    g = k.shape[2]
    p = np.exp(scores - lse.reshape(b, g, h // g, s, 1))
    dyg = dy.reshape(b, s, g, h // g, v.shape[-1])
    delta = np.moveaxis((dy * y).sum(-1).reshape(b, s, g, h // g), 1, 3)[..., None]
    dv = np.einsum("bgrst,bsgrv->btgv", p, dyg)
    ds = p * (np.einsum("bsgrv,btgv->bgrst", dyg, v) - delta) / np.sqrt(d)
    dq = np.einsum("bgrst,btgk->bsgrk", ds, k).reshape(q.shape)
    dk = np.einsum("bgrst,bsgrk->btgk", ds, q.reshape(b, s, g, h // g, d))
    return [dq, np.stack([dk, dv], axis=1)] if len(args) == 5 else [dq, dk, dv]
