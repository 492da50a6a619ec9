"""Maximum, argmax and top-k, with their forms over a split dimension."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, call, product, substitute
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule, parse_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import PicksOne
from stagec.ir.types import FLOATS, axis_size
from stagec.ir_spec.ops.base import SPEC, gradients, present
from stagec.ir_spec.ops.contraction import broadcast
from stagec.ir_spec.ops.layout import whole_dimensions

_REDUCED = Param("spec", "str", SPEC.doc, required=True, positional=True)


class Max(OpDef):
    """Maximum over the factors that the result does not have, such as "bsv->bs".

    One comparison per element. Over a split factor, the result is a partial maximum, `max(tp)`. The
    gradient is divided among the elements that equal the maximum, as in `torch.amax`.
    """

    name = "stg.max"
    operands = ("x",)
    params = (_REDUCED, Param("to", "name", "the element type of the result (default: that of x)"))
    flops_per_point = 1
    example = '%m = stg.max["bsv->bs"](%logits) : bf16[B, S]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"), reduction="max")

    def verify(self, op: Operation) -> Iterator[str]:
        yield from whole_dimensions(op)
        if not self.rule(op).contracted(0):
            yield f"expects a rule that reduces a dimension, found '{op.text('spec')}'"
        if "to" in op.attrs and op.text("to") not in FLOATS:
            yield f"'to' expects a floating-point type, found {op.text('to')}"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to", op.operands[0].tensor.dtype)]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        dy, x, y = present(grads[0]), op.operands[0], op.result
        if dy.tensor.dtype != x.tensor.dtype:
            dy = b.value("stg.cast", [dy], {"to": x.tensor.dtype}, hint=dy.name)
        ties = b.value("stg.max_ties", [x, y], {"spec": op.attrs["spec"]}, hint=f"{y.name}_ties")
        return gradients(b, op, [dy, x, y, ties])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [_reduced_last(op, args[0]).max(-1)]


class MaxTies(OpDef):
    """The number of elements that equal the maximum, for the gradient of `stg.max` with that rule;
    2 FLOPs per element of x."""

    name = "stg.max_ties"
    operands = ("x", "y")
    params = (_REDUCED,)
    element_types = ("i32",)
    flops_per_point = 2
    example = '%n = stg.max_ties["bsd->bd"](%x, %top) : i32[B, D]'

    def rule(self, op: Operation) -> Rule:
        row, _, kept = op.text("spec").partition("->")
        return make_rule(f"{row},{kept}->{kept}")

    def verify(self, op: Operation) -> Iterator[str]:
        return whole_dimensions(op)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [(_reduced_last(op, args[0]) == args[1][..., None]).sum(-1)]


class MaxGrad(OpDef):
    """Gradient of `stg.max` with that rule: dy divided by the number of ties where x equals the
    maximum; 2 FLOPs per element of x."""

    name = "stg.max_grad"
    operands = ("dy", "x", "y", "ties")
    params = (_REDUCED,)
    flops_per_point = 2
    example = '%dx = stg.max_grad["bsd->bd"](%dtop, %x, %top, %n) : bf16[B, S, D]'

    def rule(self, op: Operation) -> Rule:
        row, _, kept = op.text("spec").partition("->")
        return make_rule(f"{kept},{row},{kept},{kept}->{row}")

    def verify(self, op: Operation) -> Iterator[str]:
        return whole_dimensions(op)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (row,), (kept,) = parse_rule(op.text("spec"))
        dy, y, ties = (broadcast(args[i], kept, row) for i in (0, 2, 3))
        return [np.where(args[1] == y, dy / ties, 0.0)]


def _reduced_last(op: Operation, x: Array) -> Array:
    """The operand with all reduced dimensions combined into a last one."""
    (row,), (kept,) = parse_rule(op.text("spec"))
    first = [row.index(g) for g in kept]
    last = [d for d in range(len(row)) if d not in first]
    moved = np.transpose(x, first + last)
    return moved.reshape([*moved.shape[: len(first)], -1])


# -- indices of the largest ------------------------------------------------------------------------


class ArgMax(OpDef):
    """The index of the first maximum along the last dimension, and the maximum; one comparison per
    element.

    Over a split dimension, each rank computes its own, an all_gather collects one index and one
    value per rank, and the best is chosen. Indices have no gradient; use `stg.max` for a maximum
    with a gradient.
    """

    name = "stg.argmax"
    operands = ("x",)
    results = ("index", "value?")
    traits = (PicksOne(),)
    index = IndexRule("...v->...,...", special="v")
    element_types = ("i32", "x")
    flops_per_point = 1
    example = "%i = stg.argmax(%logits) : i32[B, S]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if any(g is not None for g in grads):
            raise op.error(
                f"'{op.name}' has no gradient for its maximum",
                remedy='use stg.max["...v->..."] for a maximum on the path to the loss',
            )
        return [None]

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        (over,) = special.values()
        names = [v.name for v in (op.results[0], op.operands[0])]
        cut, length = _cut(b, op.operands[0], over)
        mine = b.op("stg.argmax", [cut], names=[f"{names[0]}_part", f"{names[1]}_top"]).results
        indices, values = (_gathered(b, v, over, v.tensor.rank - 1) for v in mine)
        best, top = b.op("stg.argmax", [values], names=[f"{names[0]}_best", "top"]).results
        index = b.value("stg.chosen", [indices, best], {"stride": length}, hint=names[0])
        return [index, top]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0].argmax(-1), args[0].max(-1)][: len(op.results)]


_TOP = IndexRule("...v->...k,...k", special="v", whole="k", sizes={"k": "k"})


class TopK(OpDef):
    """The k largest elements along the last dimension, largest first, and their indices; one
    comparison per element.

    Over a split dimension, each rank computes its own k, an all_gather collects k values and k
    indices per rank, and the best of those are chosen. A kernel reads its operand twice: it counts
    elements by their leading bits before it takes the largest (sgl-kernel,
    csrc/elementwise/topk.cu: `fast_topk_cuda_tl`).
    """

    name = "stg.topk"
    operands = ("x",)
    results = ("values", "indices")
    params = (
        Param("k", "size", "how many", required=True),
        Param("at_most", "flag", "all elements if there are fewer than k"),
    )
    element_types = ("x", "i32")
    example = "%v, %i = stg.topk[k = T](%logits) : (bf16[B, S, T], i32[B, S, T])"

    def rule(self, op: Operation) -> Rule:
        return replace(_TOP.of(op), sizes={"k": self.count(op)})

    def count(self, op: Operation) -> Expr:
        """The number of elements that it takes."""
        k = op.expr("k")
        return call("min", [k, op.operands[0].tensor.shape[-1]]) if op.flag("at_most") else k

    def verify(self, op: Operation) -> Iterator[str]:
        k, size = self.count(op).value, op.operands[0].tensor.shape[-1]
        if k is not None and size.value is not None and k > size.value:
            yield f"expects k of at most {size}, the last dimension of its operand, found {k}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(size for f, size in n.items() if f != "k")

    def bytes_touched(self, op: Operation) -> Expr:
        return super().bytes_touched(op) + op.operands[0].tensor.local_bytes

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """For scores of keys, k may be the number of keys, including cached ones."""
        shape = op.operands[0].tensor.shape
        if len(shape) < 3 or not step.is_tokens(shape[1]):
            return super().serve(step, op)
        if not step.is_tokens(shape[-1]) and not op.flag("at_most"):
            op.attrs["k"] = substitute(op.expr("k"), {step.new.symbol_name or "": shape[-1]})
        return op.results

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        attrs = {"size": op.operands[0].tensor.shape[-1]}
        return gradients(b, op, [grads[0], op.results[1]], attrs)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        (over,) = special.values()
        names = [v.name for v in op.results]
        cut, length = _cut(b, op.operands[0], over)
        k = self.count(op)
        each = call("min", [k, length])
        mine = b.op("stg.topk", [cut], {"k": each}, names=[f"{n}_part" for n in names]).results
        values, indices = (_joined(b, _gathered(b, v, over, v.tensor.rank - 2)) for v in mine)
        best = b.op("stg.topk", [values], {"k": k}, names=[names[0], f"{names[1]}_best"])
        top, chosen = best.results
        attrs = {"stride": length, "each": each}
        return [top, b.value("stg.chosen", [indices, chosen], attrs, hint=names[1])]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        order = np.argsort(-args[0], axis=-1, kind="stable")[..., : ctx.size(self.count(op))]
        return [np.take_along_axis(args[0], order, -1), order]


class TopKGrad(OpDef):
    """Gradient of `stg.topk`: the gradients of the values at their indices, zeros elsewhere; no
    FLOPs."""

    name = "stg.topk_grad"
    operands = ("dvalues", "indices")
    params = (Param("size", "size", "of the dimension that was searched", required=True),)
    index = IndexRule("...k,...k->...v", whole="k", linear=(0,), sizes={"v": "size"})
    example = "%dl = stg.topk_grad[size = V](%dv, %i) : bf16[B, S, V]"

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("size") if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dv, indices = args
        here = indices[..., None] == np.asarray(ctx.positions(op.result.tensor.dims[-1]))
        return [(dv[..., None] * here).sum(-2)]


_CHOSEN = IndexRule("...n,...->...", whole="n")
_EACH_CHOSEN = IndexRule("...n,...k->...k", whole="nk")


class Chosen(OpDef):
    """The indices in the whole dimension of the candidates at `places`.

    Each part of `stride` elements has `each` candidates, given by their indices in the part, one
    part after the other.
    """

    name = "stg.chosen"
    operands = ("indices", "places")
    params = (
        Param("stride", "size", "the elements of one part", required=True),
        Param("each", "size", "the candidates of one part (default 1)"),
    )
    example = "%i = stg.chosen[stride = V/4, each = T](%candidates, %places) : i32[B, S, T]"

    def rule(self, op: Operation) -> Rule:
        one = op.operands[1].tensor.rank < op.operands[0].tensor.rank
        return (_CHOSEN if one else _EACH_CHOSEN).of(op)

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[-1] if operand == 1 else op.expr("stride")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        indices, places = args
        each = ctx.size(op.expr("each")) if "each" in op.attrs else 1
        one = places.ndim < indices.ndim
        chosen = np.take_along_axis(indices, places[..., None] if one else places, -1)
        own = chosen[..., 0] if one else chosen
        return [own + places // each * ctx.size(op.expr("stride"))]


def _cut(b: Builder, x: Value, over: tuple[str, ...]) -> tuple[Value, Expr]:
    """Split the last dimension into ranks and the part of each; returns the value and the length of
    a part."""
    count = axis_size(over)
    row = letters(x.tensor.rank + 1)
    lead, two = row[:-2], row[-2:]
    spec = f"{lead}({two})->{lead}{two}"
    attrs: dict[str, RawAttr] = {"spec": spec, "factors": (two[0],), "sizes": (count,)}
    return b.value("stg.reshape", [x], attrs, hint=f"{x.name}_parts"), x.tensor.shape[-1] / count


def _gathered(b: Builder, x: Value, over: tuple[str, ...], dim: int) -> Value:
    return b.value("stg.all_gather", [x], {"over": over, "dim": dim}, hint=f"{x.name}_g")


def _joined(b: Builder, x: Value) -> Value:
    """Combine the last two dimensions."""
    row = letters(x.tensor.rank)
    spec = f"{row}->{row[:-2]}({row[-2:]})"
    return b.value("stg.reshape", [x], {"spec": spec}, hint=f"{x.name}_all")
