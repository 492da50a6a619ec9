"""Ring attention (arXiv 2310.01889): the steps, and the loops that attention becomes where its
sequence is split.

Every rank keeps its queries. Keys and values go round the ranks; each step is attention with those
at hand, and the results are merged by their log-sum-exp. Backward sends keys and values round
again, and their gradients, summed up in fp32, along with them until they are home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, const, product
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.types import axis_index, axis_size
from stagec.ir_spec.ops.attention_core import (
    CAUSAL,
    backward,
    core_flops,
    core_kernel,
    core_rule,
    forward,
    masked,
    scores_of,
    unpack,
)
from stagec.ir_spec.ops.strategy import ORDERS


def _computed(op: Operation, flops: Expr) -> Expr:
    """What kernels compute in a step that is not left out, masks ignored. In zigzag order a causal
    mask hides half of the keys, or all keys from half of the queries, in every step but the first:
    kernels leave that half out."""
    halved = not op.flag("home") and op.text("order") == "zigzag"
    return flops / 2 if op.flag("causal") and halved else flops


def _executed(op: Operation, flops: Expr) -> Expr:
    """What a causal mask leaves of that: half of the first step, and all of the others."""
    return flops / 2 if _masks(op) else flops


def _masks(op: Operation) -> bool:
    """Whether a mask hides some of what kernels compute."""
    return op.flag("causal") and op.flag("home")


def _kernel(op: Operation, kind: str, n: Sizes) -> KernelShape:
    """With the keys of one step: those that kernels leave out are no keys, and only in the first
    step the mask hides some of the rest."""
    keys = _computed(op, n["s"])
    return core_kernel(kind, op.operands[0].tensor.dtype, n, keys, _masks(op))


class _Step(OpDef):
    """Base of the steps of a ring."""

    params = (
        CAUSAL,
        Param("over", "axes", "the axes that keys and values go round", required=True),
        Param("order", "name", "how positions lie on ranks", required=True, choices=ORDERS),
        Param("home", "flag", "keys and values are the rank's own: the first step"),
    )

    def active(self, op: Operation) -> Expr | None:
        """In plain order a causal mask hides all that comes from later ranks: rank i sees i."""
        everything = not op.flag("causal") or op.flag("home") or op.text("order") == "zigzag"
        return None if everything else axis_index(op.names("over"))


def _source(op: Operation, ctx: NumericContext) -> NumericContext:
    """The rank whose keys and values are at hand."""
    return ctx if op.flag("home") else ctx.moved(op.names("over"), -(ctx.iteration + 1))


class AttentionBlock(_Step):
    """A step of ring attention: queries with one rank's keys and values, and the log-sum-exp.

    Without `home`, in a repeat, keys and values come from one rank further back in every iteration.
    Rows that see no key give 0 and -inf. FLOPs as `stg.attention`; under a causal mask, in zigzag
    order, half of them in every step: of the first one the mask hides the rest, of the others
    kernels compute no more.
    """

    name = "stg.attention_block"
    operands = ("q", "k", "v*")
    results = ("result", "lse")
    example = (
        "%y, %l = stg.attention_block[causal, over = cp, order = zigzag](%q, %k, %v) : "
        "(bf16[B, S@cp, H, K], f32[B, H, S@cp])"
    )

    def rule(self, op: Operation) -> Rule:
        return core_rule(op, "bs(gr)k,{kv}->bs(gr){v},b(gr)s", 1, "s")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "f32"]

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _executed(op, self.matmul_flops(op, n))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return _computed(op, core_flops(n, 1, 1))

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, "attention", n)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        q, k, v = unpack(args)
        return forward(q, v, masked(op, ctx, _source(op, ctx), 0, scores_of(q, k)))


class AttentionBlockGrad(_Step):
    """A step backward: what one rank's keys and values give to the gradients, from the final result
    and log-sum-exp; five products, as `stg.attention_grad`."""

    name = "stg.attention_block_grad"
    operands = ("dy", "y", "lse", "q", "k", "v*")
    results = ("dq", "dk", "dv?")
    example = (
        "%dq, %dk, %dv = stg.attention_block_grad[causal, over = cp, order = zigzag]"
        "(%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, S@cp, H, K], bf16[B, S@cp, G, K], bf16[B, S@cp, G, K])"
    )

    def rule(self, op: Operation) -> Rule:
        return core_rule(op, "bs(gr){v},bs(gr){v},b(gr)s,bs(gr)k,{kv}->bs(gr)k,{kv}", 4, "s")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _executed(op, self.matmul_flops(op, n))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return _computed(op, core_flops(n, 3, 2))

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        return _kernel(op, "attention_backward", n)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        _, k, _ = unpack(args[3:])
        return backward(args, masked(op, ctx, _source(op, ctx), 3, scores_of(args[3], k)))


class MergeAttention(OpDef):
    """Merges attention over more keys into a running result, in place and in fp32: the online
    softmax (arXiv 1805.02867). 3 FLOPs per element of the result."""

    name = "stg.merge_attention"
    operands = ("total", "total_lse", "x", "lse")
    results = ("result", "lse")
    example = (
        "%t2, %l2 = stg.merge_attention(%t, %l, %y, %m) : (f32[B, S@cp, H, K], f32[B, H, S@cp])"
    )

    def rule(self, op: Operation) -> Rule:
        return make_rule("bshk,bhs,bshk,bhs->bshk,bhs")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return ["f32", "f32"]

    def reuses(self, op: Operation, result: int) -> int | None:
        return result

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in "bshk") * 3

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        total, total_lse, x, lse = args
        merged = np.logaddexp(total_lse, lse)
        old, new = (np.swapaxes(np.exp(v - merged), 1, 2)[..., None] for v in (total_lse, lse))
        return [total * old + x * new, merged]


# -- the loops -------------------------------------------------------------------------------------


def ring_forward(b: Builder, op: Operation, over: Sequence[str]) -> list[Value]:
    """`stg.attention` of a sequence split over these axes: n steps and n-1 transfers of keys and
    values."""
    (q, *kv), attrs = op.operands, _attrs(op, over)
    names = [op.results[0].name, f"{op.results[0].name}_lse"]
    first = b.op("stg.attention_block", op.operands, {**attrs, "home": True}, names=names).results

    def step(inner: Builder, values: list[Value]) -> list[Value]:
        moved = _shift(inner, values[:-2], over)
        parts = inner.op("stg.attention_block", [q, *moved], attrs, names=_named(names, "part"))
        operands = [*values[-2:], *parts.results]
        merged = inner.op("stg.merge_attention", operands, names=_named(names, "sum"))
        return [*moved, *merged.results]

    start = [*kv, _cast(b, first[0], "f32"), first[1]]
    total, lse = _go_round(b, start, over, step)[-2:]
    return [_cast(b, total, q.tensor.dtype), lse]


def ring_backward(b: Builder, op: Operation, over: Sequence[str]) -> list[Value]:
    """`stg.attention_grad` of a sequence split over these axes: n steps, n-1 transfers of keys and
    values and n of their gradients, which end where they belong."""
    given, kv, attrs = op.operands[:4], op.operands[4:], _attrs(op, over)
    names = [r.name for r in op.results]
    first = b.op("stg.attention_block_grad", op.operands, {**attrs, "home": True}, names=names)

    def step(inner: Builder, values: list[Value]) -> list[Value]:
        moved = _shift(inner, values[: len(kv)], over)
        dq, *dkv = values[len(kv) :]
        sums = [dq, *_shift(inner, dkv, over)]
        operands = [*given, *moved]
        parts = inner.op("stg.attention_block_grad", operands, attrs, names=_named(names, "part"))
        pairs = zip(sums, parts.results, _named(names, "sum"), strict=True)
        return [*moved, *(inner.value("stg.add", p, {"into": True}, hint=n) for *p, n in pairs)]

    start = [*kv, *(_cast(b, grad, "f32") for grad in first.results)]
    dq, *dkv = _go_round(b, start, over, step)[len(kv) :]
    dtypes = [r.tensor.dtype for r in op.results]
    home = [dq, *_shift(b, dkv, over)]
    return [_cast(b, grad, dtype) for grad, dtype in zip(home, dtypes, strict=True)]


def _attrs(op: Operation, over: Sequence[str]) -> dict[str, RawAttr]:
    causal: dict[str, RawAttr] = {"causal": True} if op.flag("causal") else {}
    return {**causal, "over": tuple(over), "order": op.text("ring")}


def _named(names: Sequence[str], suffix: str) -> list[str]:
    return [f"{n}_{suffix}" for n in names]


def _cast(b: Builder, value: Value, dtype: str) -> Value:
    if value.tensor.dtype == dtype:
        return value
    return b.value("stg.cast", [value], {"to": dtype}, hint=f"{value.name}_{dtype}")


def _shift(b: Builder, values: Sequence[Value], over: Sequence[str]) -> list[Value]:
    """One message with these values to the next rank."""
    names = _named([v.name for v in values], "next")
    return b.op("stg.collective_permute", values, {"over": tuple(over)}, names=names).results


def _go_round(
    b: Builder,
    start: Sequence[Value],
    over: Sequence[str],
    step: Callable[[Builder, list[Value]], list[Value]],
) -> list[Value]:
    """A repeat of all steps but the first, which carries these values."""
    attrs: dict[str, Expr] = {"count": axis_size(over) - 1, "carry": const(len(start))}
    loop = b.insert(Operation(b.registry["stg.repeat"], start, attrs, loc=b.loc))
    region = loop.make_region()
    args = [region.add_arg(f"{v.name}_i", v.tensor.inner, v.loc) for v in start]
    inner = Builder(b.registry, region, loc=b.loc, phase=b.phase)
    inner.finish = b.finish
    inner.op("stg.yield", step(inner, args), types=())
    names = _named([v.name for v in start], "last")
    return [loop.add_result(n, a.type) for n, a in zip(names, args, strict=True)]


OPS = (AttentionBlock(), AttentionBlockGrad(), MergeAttention())
