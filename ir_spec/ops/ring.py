"""Ring attention (arXiv 2310.01889): its steps, and the loops that replace attention over a split
sequence.

Every rank keeps its queries. Keys and values go round the ranks. Each step is attention with the
keys and values that have just arrived, and the results are merged by their log-sum-exp. Backward
sends keys and values round again, together with their gradients, which are summed in fp32 and end
on the ranks that own the keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Expr, call, const, expand
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.types import Dim, TensorType, axis_size
from stagec.ir_spec.ops.attention_base import AttentionOp
from stagec.ir_spec.ops.attention_core import ORDERS, SCORES, all_pairs
from stagec.ir_spec.ops.contraction import cast_to
from stagec.ir_spec.ops.masks import is_plain
from stagec.ir_spec.ops.ring_work import (
    active,
    computed_pairs,
    edge_rows,
    has_edge,
    hops,
    seen_pairs,
    whole_hops,
)
from stagec.ir_spec.ops.sequence_parts import from_parts, to_parts


class _Step(AttentionOp):
    """Base of the steps of a ring."""

    params = (
        *SCORES,
        Param("over", "axes", "the axes that keys and values go round", required=True),
        Param("order", "name", "the order of positions on ranks", required=True, choices=ORDERS),
        Param("home", "flag", "keys and values are the rank's own: the first step"),
    )

    def active(self, op: Operation) -> Expr | None:
        return None if op.flag("home") else active(op, op.operands[self.queries].tensor.dims[1])

    def left(self, op: Operation, n: Sizes) -> Expr:
        if is_plain(op) and not (op.flag("causal") and op.flag("home")):
            return self.computed(op, n)
        return seen_pairs(op, n["s"])

    def computed(self, op: Operation, n: Sizes) -> Expr:
        return computed_pairs(op, all_pairs(n))

    def met(self, op: Operation, n: Sizes) -> tuple[Expr, bool]:
        """The keys of one step, without those that kernels leave out. Only in the first step the
        mask hides some of them."""
        return self.computed(op, n) / n["s"], op.flag("causal") and op.flag("home")

    def source(self, op: Operation, ctx: NumericContext) -> NumericContext:
        return ctx if op.flag("home") else ctx.moved(op.names("over"), -(ctx.iteration + 1))


class AttentionBlock(_Step):
    """A step of ring attention: attention of a rank's queries with one rank's keys and values, and
    its log-sum-exp.

    Without `home`, in a repeat, keys and values come from one rank further back in every iteration.
    Rows that see no key give 0 and -inf. FLOPs are those of the pairs that the mask leaves. Under a
    causal mask in zigzag order these are s(s+1)/2 in the first step, where kernels compute all s^2,
    and s^2/2 in the others. Other masks: `stagec/ir_spec/ops/ring_work.py`.
    """

    name = "stg.attention_block"
    operands = ("q", "k", "v*")
    results = ("result", "lse")
    element_types = ("q", "f32")
    example = (
        "%y, %l = stg.attention_block[causal, over = cp, order = zigzag](%q, %k, %v) : "
        "(bf16[B, S@cp, H, K], f32[B, H, S@cp])"
    )


class AttentionBlockGrad(_Step):
    """A step of ring attention backward: what one rank's keys and values add to the gradients, from
    the final result and log-sum-exp. It has five products, as `stg.attention_grad`."""

    name = "stg.attention_block_grad"
    backward = True
    operands = ("dy", "y", "lse", "q", "k", "v*")
    results = ("dq", "dk", "dv?", "dsinks?")
    example = (
        "%dq, %dk, %dv = stg.attention_block_grad[causal, over = cp, order = zigzag]"
        "(%da, %a, %lse, %q, %k, %v) : "
        "(bf16[B, S@cp, H, K], bf16[B, S@cp, G, K], bf16[B, S@cp, G, K])"
    )


class MergeAttention(OpDef):
    """Merges attention over more keys into a running result, in place and in fp32: the online
    softmax (arXiv 1805.02867). 3 FLOPs per element of the result."""

    name = "stg.merge_attention"
    operands = ("total", "total_lse", "x", "lse")
    results = ("result", "lse")
    index = IndexRule("bshk,bhs,bshk,bhs->bshk,bhs")
    element_types = ("f32", "f32")
    flops_per_point = 3
    example = (
        "%t2, %l2 = stg.merge_attention(%t, %l, %y, %m) : (f32[B, S@cp, H, K], f32[B, H, S@cp])"
    )

    def reuses(self, op: Operation, result: int) -> int | None:
        return result

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        total, total_lse, x, lse = args
        merged = np.logaddexp(total_lse, lse)
        old, new = (np.swapaxes(np.exp(v - merged), 1, 2)[..., None] for v in (total_lse, lse))
        return [total * old + x * new, merged]


# -- the loops -------------------------------------------------------------------------------------


def ring_forward(b: Builder, op: Operation, over: Sequence[str]) -> list[Value]:
    """Build `stg.attention` of a sequence that is split over these axes, of n ranks: n steps and
    n-1 transfers of keys and values, fewer if the mask hides distant ones. Sinks count in the first
    step. Returns the result and its log-sum-exp."""
    attrs, home = _attrs(op, over)
    names = [op.results[0].name, f"{op.results[0].name}_lse"]
    first = b.op("stg.attention_block", op.operands, home, names=names).results
    q, *kv = op.operands[: len(op.operands) - op.flag("sinks")]

    def step(inner: Builder, values: list[Value]) -> list[Value]:
        moved = _shift(inner, values[:-2], over)
        parts = inner.op("stg.attention_block", [q, *moved], attrs, names=_named(names, "part"))
        operands = [*values[-2:], *parts.results]
        merged = inner.op("stg.merge_attention", operands, names=_named(names, "sum"))
        return [*moved, *merged.results]

    start = [*kv, cast_to(b, first[0], "f32"), first[1]]
    values = _go_round(b, start, _hops(op, over), step)
    if has_edge(op, op.text("ring")):
        values = edge_forward(b, op, over, q, values, attrs)
    total, lse = values[-2:]
    return [cast_to(b, total, q.tensor.dtype), lse]


def ring_backward(b: Builder, op: Operation, over: Sequence[str]) -> list[Value]:
    """Build `stg.attention_grad` of a sequence that is split over these axes, of n ranks: n steps,
    n-1 transfers of keys and values and n of their gradients, the last of which brings them to the
    rank that owns the keys and values."""
    attrs, home = _attrs(op, over)
    names = [r.name for r in op.results]
    workspaces = _eager_workspaces(b, op, over)
    first = b.op("stg.attention_block_grad", op.operands, home, names=names).results
    operands = op.operands[: len(op.operands) - op.flag("sinks")]
    queries, kv = operands[:4], operands[4:]
    count = 1 + len(kv)

    def step(inner: Builder, values: list[Value]) -> list[Value]:
        moved = _shift(inner, values[: len(kv)], over)
        dq, *dkv = values[len(kv) :]
        sums = [dq, *_shift(inner, dkv, over)]
        part_names = _named(names[:count], "part")
        parts = inner.op("stg.attention_block_grad", [*queries, *moved], attrs, names=part_names)
        pairs = zip(sums, parts.results, _named(names[:count], "sum"), strict=True)
        return [*moved, *(inner.value("stg.add", p, {"into": True}, hint=n) for *p, n in pairs)]

    start = [*kv, *(cast_to(b, grad, "f32") for grad in first[:count])]
    steps = _hops(op, over)
    values = _go_round(b, start, steps, step)
    if has_edge(op, op.text("ring")):
        values = edge_backward(b, op, over, queries, values, attrs)
    dq, *dkv = values[len(kv) :]
    dtypes = [r.tensor.dtype for r in op.results]
    back = [dq, *_home(b, dkv, steps, over)]
    whole = [cast_to(b, grad, dtype) for grad, dtype in zip(back, dtypes, strict=False)]
    if workspaces:
        b.op("stg.discard", [*workspaces, *operands], types=())
    return [*whole, *first[count:]]


def _eager_workspaces(b: Builder, op: Operation, over: Sequence[str]) -> list[Value]:
    """The buffers that eager PyTorch holds in a ring backward in addition to those of its steps, on
    the first rank (torch/distributed/tensor/experimental/_context_parallel/_attention.py:
    `_templated_ring_attention_backward`); empty without the parameter `steps`.

    In fp32: sums that started as zeros, and concatenated copies of sums. In the type of the keys,
    in the second step: gradients of the step before, and

    - in the kernel, the gradient of half of the queries, keys and values concatenated for their
      last transfer, and the results of transfers: keys and values of all ranks (`gathered`), or
      those of this step and, if there is one, of a third step (`passed`);
    - if there is a third step, before that kernel, for `gathered`: contiguous copies of the rank's
      own keys and values, their concatenations for two transfers, and keys and values of all ranks.
    """
    if "steps" not in op.attrs:
        return []
    q, k = op.operands[3].tensor, op.operands[4].tensor
    queries, keys = q.local_elements, k.local_elements
    ranks = axis_size(over)
    third = call("min", [ranks - 2, ONE])  # 0 with two ranks
    narrow = queries * 3 / 2 + keys * 2 * (third + 1)
    if op.text("steps") == "gathered":
        kernel = queries * 3 / 2 + keys * 2 * ranks
        narrow = call("max", [kernel, queries + keys * 2 * (ranks + third)])
    sizes = ((k.dtype, narrow), ("f32", keys * 4))
    types = [TensorType(dtype, (Dim(expand(size)),), placed=True) for dtype, size in sizes]
    return [
        b.value("stg.workspace", (), type=t, hint=f"{op.results[0].name}_beside") for t in types
    ]


def _home(b: Builder, values: Sequence[Value], steps: Expr, over: Sequence[str]) -> list[Value]:
    """Send values that have moved `steps` places to the ranks that own them: one place further if
    that completes the round, else all the places back (none if `steps` is 0)."""
    if steps == axis_size(over) - 1:
        return _shift(b, values, over)
    return _go_round(b, values, call("min", [steps, ONE]), lambda i, v: _shift(i, v, over, -steps))


def _attrs(op: Operation, over: Sequence[str]) -> tuple[dict[str, RawAttr], dict[str, RawAttr]]:
    """The parameters of the steps after the first, and those of the first step."""
    shared: dict[str, RawAttr] = {p.name: op.attrs[p.name] for p in SCORES if p.name in op.attrs}
    home = {**shared, "home": True, "over": tuple(over), "order": op.text("ring")}
    return {name: v for name, v in home.items() if name not in ("sinks", "home")}, home


def _hops(op: Operation, over: Sequence[str]) -> Expr:
    """The number of steps after the first in which whole blocks travel."""
    return whole_hops(op, _rows(op), axis_size(over), op.text("ring"))


def _rows(op: Operation) -> Expr:
    """The length of the whole sequence of queries, from the first result."""
    return op.results[0].tensor.dims[1].size


# -- the last step under a window ------------------------------------------------------------------


@dataclass(frozen=True)
class _EdgeStep:
    """The last step under a window: the rows of keys and values that are `sent`, how often the step
    runs (1 or 0), and the parameters of its op."""

    sent: Sequence[Value]
    count: Expr
    attrs: Mapping[str, RawAttr]


def _edge_step(
    b: Builder,
    op: Operation,
    over: Sequence[str],
    kv: Sequence[Value],
    attrs: Mapping[str, RawAttr],
) -> _EdgeStep:
    size, ranks = _rows(op), axis_size(over)
    rows: dict[str, RawAttr] = {"rows": edge_rows(op, size, ranks)}
    parts = [to_parts(b, v, "bshk", over) for v in kv]
    sent = [b.value("stg.conv_halo", [v], rows, hint=f"{v.name}_edge") for v in parts]
    edge_attrs = {n: v for n, v in attrs.items() if n != "order"}
    edge_attrs["after"] = whole_hops(op, size, ranks, "plain")
    return _EdgeStep(sent, call("min", [hops(op, size, ranks, "plain"), ONE]), edge_attrs)


def edge_forward(
    b: Builder,
    op: Operation,
    over: Sequence[str],
    q: Value,
    values: Sequence[Value],
    attrs: Mapping[str, RawAttr],
) -> list[Value]:
    """Build the step with the last keys that a window reaches, after the steps with whole blocks.
    Returns the result and its log-sum-exp."""
    *kv, total, lse = values
    edge = _edge_step(b, op, over, kv, attrs)
    names = [f"{op.results[0].name}_edge", f"{op.results[0].name}_edge_lse"]

    def step(inner: Builder, values: list[Value]) -> list[Value]:
        moved = _shift(inner, edge.sent, over)
        operands = [to_parts(inner, q, "bshk", over), *moved]
        y, m = inner.op("stg.attention_edge", operands, dict(edge.attrs), names=names).results
        whole = [from_parts(inner, y, "bshk", y.name), from_parts(inner, m, "bhs", m.name)]
        return inner.op("stg.merge_attention", [*values, *whole], names=names).results

    return _go_round(b, [total, lse], edge.count, step)


def edge_backward(
    b: Builder,
    op: Operation,
    over: Sequence[str],
    queries: Sequence[Value],
    values: Sequence[Value],
    attrs: Mapping[str, RawAttr],
) -> list[Value]:
    """The same backward: the gradients of these keys and values come back alone, and are added to
    those of their block. A rank that does not work in this step sends zeros back."""
    k, v, *grads = values
    edge = _edge_step(b, op, over, [k, v], attrs)
    texts = ("bshk", "bshk", "bhs", "bshk")
    zeros = [b.value("stg.zeros_like", [x], hint=f"{x.name}_zero") for x in edge.sent]

    def step(inner: Builder, values: list[Value]) -> list[Value]:
        moved = _shift(inner, edge.sent, over)
        operands = [to_parts(inner, x, t, over) for x, t in zip(queries, texts, strict=True)]
        names = [f"{r.name}_edge" for r in op.results[:3]]
        made = inner.op(
            "stg.attention_edge_grad", [*operands, *moved], dict(edge.attrs), names=names
        ).results
        dq, *rest = values
        own = from_parts(inner, made[0], "bshk", made[0].name)
        sums = [inner.value("stg.add", [dq, own], {"into": True}, hint=dq.name)]
        pairs = zip(zeros, made[1:], strict=True)
        sent = [inner.value("stg.add", p, {"into": True}, hint=p[1].name) for p in pairs]
        for total, back in zip(rest, _shift(inner, sent, over, -ONE), strict=True):
            parts = to_parts(inner, total, "bshk", over)
            joined = inner.value("stg.add_edge", [parts, back], hint=f"{total.name}_edge")
            sums.append(from_parts(inner, joined, "bshk", total.name))
        return sums

    return [k, v, *_go_round(b, grads, edge.count, step)]


def _named(names: Sequence[str], suffix: str) -> list[str]:
    return [f"{n}_{suffix}" for n in names]


def _shift(b: Builder, values: Sequence[Value], over: Sequence[str], by: Expr = ONE) -> list[Value]:
    """Send these values to the rank `by` places further, in one message."""
    names = _named([v.name for v in values], "next")
    attrs: dict[str, RawAttr] = {"over": tuple(over)}
    if by != 1:
        attrs["by"] = by
    return b.op("stg.collective_permute", values, attrs, names=names).results


def _go_round(
    b: Builder,
    start: Sequence[Value],
    steps: Expr,
    step: Callable[[Builder, list[Value]], list[Value]],
) -> list[Value]:
    """Build an `stg.repeat` of `steps` iterations that carries these values; `step` builds its
    body. Returns the values after the last iteration."""
    attrs: dict[str, Expr] = {"count": steps, "carry": const(len(start))}
    loop = b.insert(Operation(b.registry["stg.repeat"], start, attrs, loc=b.loc))
    region = loop.make_region()
    args = [region.add_arg(f"{v.name}_i", v.tensor.inner, v.loc) for v in start]
    inner = Builder(b.registry, region, loc=b.loc, phase=b.phase)
    inner.finish = b.finish
    inner.op("stg.yield", step(inner, args), types=())
    names = _named([v.name for v in start], "last")
    return [loop.add_result(n, a.type) for n, a in zip(names, args, strict=True)]
