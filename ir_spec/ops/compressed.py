"""Attention to compressed keys (DeepSeek-V4): a query sees the keys of a window one by one, and
those before it as rows, each of which is a weighted mean of the keys of `rate` tokens.

    %c0 = stg.compress[rate = M](%kv, %gate, %bias)    [B, S / M, K], the rows
    %c1 = stg.rmsnorm(%c0, %norm)
    %c  = stg.rope[every = M](%c1)                     row i is at position i M
    %a  = stg.compressed_attention[window = W, rate = M](%q, %k, %sinks, %c)

A query at position i sees row j if all tokens of the row are up to i: (j + 1) M <= i + 1. Serving
caches the rows, and the inputs of those that are not complete.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, ZERO, Expr, call, const, expand, same
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.types import Dim, TensorType
from stagec.ir_spec.ops.attention_base import SELECTING, AttentionWork
from stagec.ir_spec.ops.base import STATE, gradients, need_result, no_gradient
from stagec.ir_spec.ops.cache_rows import PAST, first_key, past_of
from stagec.ir_spec.ops.masks import RATE, complete_rows, pairs_of_rows, ramp, whole_rows

_OVERLAP = Param("overlap", "flag", "rows are also of the tokens of the row before")


class _Compressing(OpDef):
    """Base class of compression and its gradient. With `overlap`, channels are those of the row
    after the tokens, followed by those of their own row."""

    cost = 0

    def letters(self, op: Operation) -> tuple[str, str]:
        """The letters of the channels of tokens, and of rows."""
        return ("(zk)", "k") if op.flag("overlap") else ("k", "k")

    def made(self, op: Operation, text: str, rows: Expr, whole: str) -> Rule:
        tokens, row = self.letters(op)
        sizes = {"r": rows, **({"z": const(2)} if op.flag("overlap") else {})}
        z = "z" if op.flag("overlap") else ""
        return make_rule(text.format(c=tokens, k=row), whole=f"srm{whole}{z}", sizes=sizes)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return n["b"] * n["s"] * n.get("z", ONE) * n["k"] * self.cost


class Compress(_Compressing):
    """The mean of `kv` [B, S, C] over each `rate` tokens, channel by channel, with the weights of a
    softmax of `gate` [B, S, C] plus `bias` [rate, C]; further tokens at the end have no row.

    With `overlap`, C is 2 K, and row i is the mean over the first K channels of the tokens of row
    i - 1 and the last K of its own: of 2 rate values, for the first row of rate
    (modeling_deepseek_v4.py of transformers). 8 FLOPs per element of `kv`: bias, softmax, and the
    mean. A split sequence is gathered.

    With `state`, the last operand has keys and gates of the last rate or, with `overlap`, 2 rate
    tokens ([B, 2, .., C], token p at p modulo their number), and the second result those after the
    step in the same buffer. Rows are then those of all tokens of the step, and the last of them may
    be incomplete.
    """

    name = "stg.compress"
    operands = ("kv", "gate", "bias", "state*")
    results = ("result", "last?")
    element_types = ("kv", "state")
    params = (RATE, _OVERLAP, STATE, PAST)
    example = "%c = stg.compress[rate = 4](%x, %x, %b) : bf16[B, (S - S % 4)/4, D]"
    cost = 8

    def rule(self, op: Operation) -> Rule:
        rate, tokens = op.expr("rate"), op.operands[0].tensor.shape[1]
        if op.flag("state"):
            rows = touched_rows(tokens, rate)
            text = "bs{c},bs{c},m{c},bxn{c}->br{k},bxn{c}"
            return self.made(op, text, rows, "xn")
        return self.made(op, "bs{c},bs{c},m{c}->br{k}", whole_rows(tokens, rate), "")

    def verify(self, op: Operation) -> Iterator[str]:
        rows = op.operands[2].tensor.shape[0]
        if not same(rows, op.expr("rate")):
            yield f"expects a bias of {op.expr('rate')} rows, one for each token, found {rows}"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keep keys and gates of the tokens of incomplete rows, in fp32."""
        kv = op.operands[0].tensor
        if not step.is_tokens(kv.shape[1]):
            return super().serve(step, op)
        op.attrs |= step.past_attr()
        tokens = op.expr("rate") * (2 if op.flag("overlap") else 1)
        dims = (kv.dims[0], Dim(const(2)), Dim(tokens), kv.dims[2])
        return step.carry(op, TensorType("f32", dims))

    def reuses(self, op: Operation, result: int) -> int | None:
        return 3 if result == 1 else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        no_gradient(op)
        return gradients(b, op, [grads[0], *op.operands])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        kv, gate, bias, *state = args
        rate = bias.shape[0]
        if not state:
            return [_means(kv, gate, bias, kv.shape[1] // rate, op.flag("overlap"))]
        past, length, kept = ctx.size(past_of(op)), kv.shape[1], state[0].shape[2]
        first = past // rate  # the first row
        before = rate * op.flag("overlap")
        rows = ctx.size(op.results[0].tensor.shape[1])
        wide = np.zeros((2, kv.shape[0], before + rows * rate, kv.shape[2]))
        begin = first * rate - before
        if begin < 0:
            wide[1, :, :before] = -np.inf
        for at in range(max(begin, past - kept, 0), past):
            wide[:, :, at - begin] = np.moveaxis(state[0][:, :, at % kept], 1, 0)
        end = min(past + length, begin + wide.shape[2])
        new = slice(past - begin, end - begin)
        wide[0, :, new], wide[1, :, new] = kv[:, : end - past], gate[:, : end - past]
        made = _means(wide[0], wide[1], bias, rows, op.flag("overlap"), inner=True)
        last = state[0].copy()
        for at in range(max(past, past + length - kept), past + length):
            last[:, 0, at % kept], last[:, 1, at % kept] = kv[:, at - past], gate[:, at - past]
        return [made, last]


class CompressGrad(_Compressing):
    """Gradient of `stg.compress`, which computes the weights again: 14 FLOPs per element."""

    name = "stg.compress_grad"
    operands = ("dy", "kv", "gate", "bias")
    results = ("dkv", "dgate", "dbias")
    element_types = ("kv", "gate", "bias")
    params = (RATE, _OVERLAP)
    example = (
        "%dk, %dg, %db = stg.compress_grad[rate = 4](%dc, %x, %x, %b) : "
        "(bf16[B, S, D], bf16[B, S, D], f32[4, D])"
    )
    cost = 14

    def rule(self, op: Operation) -> Rule:
        rows = op.operands[0].tensor.shape[1]
        return self.made(op, "br{k},bs{c},bs{c},m{c}->bs{c},bs{c},m{c}", rows, "")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, kv, gate, bias = args
        overlap, rows, rate = op.flag("overlap"), dy.shape[1], bias.shape[0]
        values = _windows(kv, rows, rate, overlap)
        logits = _windows(gate, rows, rate, overlap, -np.inf)
        weights = _softmax(logits + _of_rows(bias, overlap))
        mean = (weights * values).sum(2, keepdims=True)
        dwide = weights * dy[:, :, None]
        dlogits = dwide * (values - mean)
        dkv, dgate = (_tokens(x, kv.shape, rate, overlap) for x in (dwide, dlogits))
        used = dgate[:, : rows * rate].reshape(kv.shape[0], rows, rate, -1)
        return [dkv, dgate, used.sum((0, 1))]


def touched_rows(tokens: Expr, rate: Expr) -> Expr:
    """An upper bound of the rows to which this number of new tokens belongs."""
    return call("ceildiv", [tokens - 1, rate]) + 1


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(2, keepdims=True))
    return np.asarray(e / e.sum(2, keepdims=True))


def _of_rows(bias: Array, overlap: bool) -> Array:
    """The bias of the values of a row, [rate or 2 rate, K]."""
    half = bias.shape[1] // 2
    return np.concatenate([bias[:, :half], bias[:, half:]]) if overlap else bias


def _windows(x: Array, rows: int, rate: int, overlap: bool, fill: float = 0.0) -> Array:
    """The values of each row, [B, rows, rate or 2 rate, K]."""
    own = x[:, : rows * rate].reshape(x.shape[0], rows, rate, -1)
    if not overlap:
        return own
    half = own.shape[-1] // 2
    before = np.full_like(own[..., :half], fill)
    before[:, 1:] = own[:, :-1, :, :half]
    return np.concatenate([before, own[..., half:]], axis=2)


def _tokens(x: Array, shape: tuple[int, ...], rate: int, overlap: bool) -> Array:
    """The inverse of `_windows`: the values of tokens."""
    rows, out = x.shape[1], np.zeros(shape)
    own = x[:, :, rate:] if overlap else x
    if overlap:
        after = np.zeros_like(own)
        after[:, :-1] = x[:, 1:, :rate]
        own = np.concatenate([after, own], axis=-1)
    out[:, : rows * rate] = own.reshape(shape[0], rows * rate, shape[2])
    return out


def _means(
    kv: Array, gate: Array, bias: Array, rows: int, overlap: bool, *, inner: bool = False
) -> Array:
    """The rows; `inner` if the tokens of the row before the first one stand before the others."""
    rate, lead = bias.shape[0], int(inner and overlap)
    values = _windows(kv, rows + lead, rate, overlap)
    logits = _windows(gate, rows + lead, rate, overlap, -np.inf)
    weights = _softmax((logits + _of_rows(bias, overlap))[:, lead:])
    return np.asarray((weights * values[:, lead:]).sum(2))


class _Attends(AttentionWork):
    """Base class of the attention and its gradient."""

    def rows(self, op: Operation) -> bool:
        """Whether there are rows beside the keys of the window."""
        return "rate" in op.attrs

    def made(self, op: Operation, before: str, results: str) -> Rule:
        """The rule, with letters of operands before the queries, and of results."""
        more = ",brk" * self.rows(op) + ",bsn" * op.flag("selected")
        return make_rule(f"{before}bshk,btk,h{more}->{results}", whole="ktrn")

    def verify(self, op: Operation) -> Iterator[str]:
        expected = 3 + self.rows(op) + op.flag("selected")
        if op.flag("selected") and not self.rows(op):
            yield "expects 'rate' with 'selected', since queries select rows"
        if len(op.operands) - self.queries != expected:
            yield f"expects {expected + self.queries} operands, found {len(op.operands)}"

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        selection = op.flag("selected") and operand == len(op.operands) - 1
        return op.operands[operand - 1].tensor.shape[1] if selection else None

    def most(self, op: Operation) -> Expr | None:
        """The rows that a query sees at most, if it selects them."""
        return op.operands[-1].tensor.shape[-1] if op.flag("selected") else None

    def left(self, op: Operation, n: Sizes) -> Expr:
        tokens, window = op.operands[self.queries].tensor.shape[1], op.expr("window")
        past = op.expr("past", ZERO)
        pairs = expand(ramp(past + tokens, window) - ramp(past, window))
        if self.rows(op):
            pairs += pairs_of_rows(op, tokens, self.most(op))
        ranks = tokens / n["s"]
        return pairs if ranks == 1 else call("ceildiv", [pairs, ranks])

    def computed(self, op: Operation, n: Sizes) -> Expr:
        """All keys and rows; after cached tokens, those that queries select."""
        rows, most = n.get("r", ZERO), self.most(op)
        if "past" in op.attrs and most is not None:
            rows = call("min", [rows, most])
        return n["s"] * (n["t"] + rows)

    def _products(self, n: Sizes, pairs: Expr) -> Expr:
        return expand(n["b"] * n["h"] * pairs * n["k"] * (5 if self.backward else 2) * 2)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        """Queries share no rows: each counts as a separate sequence of 64 heads at least, with the
        mean number of keys (deepseek-ai/FlashMLA, csrc/sm100/prefill/sparse). Backward has one
        kernel for a sequence."""
        keys = call("ceildiv", [self.left(op, n), n["s"]])
        dtype = op.operands[self.queries].tensor.dtype
        if self.backward:
            extents = (n["b"], n["h"], ONE, n["s"], keys, n["k"], n["k"])
            return KernelShape("attention_backward", dtype, extents, windowed=True)
        heads = call("max", [n["h"], ONE * SELECTING])
        extents = (n["b"] * n["s"], heads, ONE, ONE, keys, n["k"], n["k"])
        return KernelShape("attention", dtype, extents)


class CompressedAttention(_Attends):
    """Attention with one key for all heads, which is also the value: [B, S, H, K] over the keys
    [B, S, K] of a window, and with `rate` over rows of `rate` tokens ([B, R, K], `stg.compress`),
    under one softmax with a logit of `sinks` [H]. With `selected`, the last operand [B, S, N] says
    which rows a query sees.

    Scores are divided by the square root of K. FLOPs are those of two products over the pairs of
    queries with keys, m(m+1)/2 + (S-m)W with m = min(S, W), and with rows, whose number is that of
    masks with `rate`. The second result is the log-sum-exp of each row. Over a split sequence, keys
    and rows are gathered.
    """

    name = "stg.compressed_attention"
    operands = ("q", "k", "sinks", "rows*")
    results = ("result", "lse?")
    params = (
        Param("window", "size", "keys that a query sees, up to its own", required=True, least=1),
        RATE,
        Param("selected", "flag", "an operand [B, S, N] says which rows each query sees"),
        PAST,
    )
    element_types = ("q", "f32")
    example = "%a = stg.compressed_attention[window = 128](%q, %k, %s) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        return self.made(op, "", "bshk,bhs")

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Cache the keys of the window, and all rows."""
        if not step.is_tokens(op.operands[0].tensor.shape[1]):
            return super().serve(step, op)
        op.set_operand(1, step.append(op.operands[1], span=op.expr("window")))
        if self.rows(op):
            op.set_operand(3, step.append(op.operands[3], rate=op.expr("rate")))
        op.attrs |= step.past_attr()
        return op.results

    def bytes_touched(self, op: Operation) -> Expr:
        """Those of all operands and results, but of cached rows those that queries select."""
        whole, most = super().bytes_touched(op), self.most(op)
        if most is None or "past" not in op.attrs:
            return whole
        rows = op.operands[3].tensor
        count = rows.dims[1].local
        read = call("min", [count, op.operands[0].tensor.dims[1].local * most])
        return whole - rows.local_bytes + rows.local_bytes * read / count

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if grads[0] is None:
            return [None] * len(op.operands)
        return gradients(b, op, [grads[0], op.results[0], need_result(op, 1, "lse"), *op.operands])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        scores, keys = _scores(op, ctx, 0, args)
        sinks = args[2][None, :, None]
        lse = np.logaddexp.reduce(np.concatenate([scores, _like(scores, sinks)], -1), axis=-1)
        return [np.einsum("bhst,btk->bshk", np.exp(scores - lse[..., None]), keys), lse]


class CompressedAttentionGrad(_Attends):
    """Gradient of `stg.compressed_attention`: five products over the same pairs, since the kernel
    recomputes the scores."""

    name = "stg.compressed_attention_grad"
    backward = True
    operands = ("dy", "y", "lse", "q", "k", "sinks", "rows*")
    results = ("dq", "dk", "dsinks", "drows?")
    element_types = ("q", "k", "sinks", "rows")
    params = CompressedAttention.params
    example = (
        "%dq, %dk, %ds = stg.compressed_attention_grad[window = 128](%da, %a, %lse, %q, %k, %s) : "
        "(bf16[B, S, H, K], bf16[B, S, K], f32[H])"
    )

    def rule(self, op: Operation) -> Rule:
        return self.made(op, "bshk,bshk,bhs,", "bshk,btk,h" + ",brk" * self.rows(op))

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y, lse, *given = args
        scores, keys = _scores(op, ctx, 3, given)
        p = np.exp(scores - lse[..., None])
        delta = (dy * y).sum(-1).transpose(0, 2, 1)
        ds = p * (np.einsum("bshk,btk->bhst", dy, keys) - delta[..., None])
        ds /= np.sqrt(keys.shape[-1])
        dkeys = np.einsum("bhst,bshk->btk", ds, given[0]) + np.einsum("bhst,bshk->btk", p, dy)
        share = np.exp(given[2][None, :, None] - lse)
        dq, count = np.einsum("bhst,btk->bshk", ds, keys), given[1].shape[1]
        grads = [dq, dkeys[:, :count], -(share * delta).sum((0, 2)), dkeys[:, count:]]
        return grads[: 3 + self.rows(op)]


def _scores(
    op: Operation, ctx: NumericContext, q: int, given: Sequence[Array]
) -> tuple[Array, Array]:
    """Scores [B, H, S, T + R], -inf where a query does not see a key, and the keys and rows."""
    queries, keys = (op.operands[q + i].tensor.dims[1] for i in (0, 1))
    at = np.asarray(ctx.positions(queries)) + ctx.size(past_of(op))
    of = np.asarray(ctx.positions(keys))
    if "past" in op.attrs:
        of = of + ctx.size(first_key(op, queries.size, keys.size))
    distance = at[:, None] - of[None, :]
    seen = np.broadcast_to(
        (distance >= 0) & (distance < ctx.size(op.expr("window"))), (1, *distance.shape)
    )
    values = given[1]
    if "rate" in op.attrs:
        rows = np.asarray(ctx.positions(op.operands[q + 3].tensor.dims[1]))
        whole = complete_rows(at, rows, ctx.size(op.expr("rate")))[None]
        if op.flag("selected"):
            whole = whole & (given[4][..., None] == rows).any(-2)
        shape = (max(len(seen), len(whole)), *distance.shape[:1])
        seen = np.concatenate([np.broadcast_to(m, (*shape, m.shape[2])) for m in (seen, whole)], -1)
        values = np.concatenate([values, given[3]], axis=1)
    scores = np.einsum("bshk,btk->bhst", given[0], values) / np.sqrt(values.shape[-1])
    return np.where(seen[:, None], scores, -np.inf), values


def _like(scores: Array, sinks: Array) -> Array:
    """The logits of sinks, one for each row of scores."""
    return np.broadcast_to(sinks[..., None], (*scores.shape[:-1], 1))
