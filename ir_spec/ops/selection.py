"""Parts of values at known places: slices, padding, one position of a sequence, concatenation and
its inverse."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ZERO, Expr, same
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Fusible, View
from stagec.ir.types import Dim
from stagec.ir_spec.ops.base import dimension, gradients
from stagec.ir_spec.ops.layout import AGAIN, all_present

_DIM = Param("dim", "int", "the dimension (default 0)")
_START = Param("start", "size", "where it begins (default 0)")


class Slice(OpDef):
    """A view of `size` elements from `start` on along a dimension, such as the first S learned
    positions of a table. The operand is not split along it; each rank takes what it needs."""

    name = "stg.slice"
    operands = ("x",)
    traits = (View(),)
    params = (_DIM, _START, Param("size", "size", "how many elements", required=True), AGAIN)
    example = "%p = stg.slice[dim = 0, start = 2, size = S](%table) : bf16[S, D]"

    def rule(self, op: Operation) -> Rule:
        return _resized(op, 0)

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Of a table with a row for each token, take the rows of the new tokens."""
        rows = op.operands[0].tensor.shape[op.integer("dim", 0)]
        if not step.is_tokens(op.expr("size")) or step.is_seen(rows):
            return super().serve(step, op)
        op.attrs["start"] = op.expr("start", ZERO) + step.past
        return op.results

    def verify(self, op: Operation) -> Iterator[str]:
        x = op.operands[0].tensor
        start = op.expr("start", ZERO)
        left = x.shape[op.integer("dim", 0)] - start - op.expr("size")
        if left.value is not None and left.value < 0:
            yield f"takes elements {start} to {start + op.expr('size')} of {x}"

    def fold(self, op: Operation) -> Value | None:
        """A slice of the whole dimension is its operand."""
        x = op.operands[0]
        return x if same(x.tensor.shape[op.integer("dim", 0)], op.expr("size")) else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        attrs: dict[str, RawAttr] = {"size": op.operands[0].tensor.shape[op.integer("dim", 0)]}
        if not op.flag("again"):
            attrs["start"] = op.expr("start", ZERO)  # a part, not a view without padding
        return gradients(b, op, grads, attrs, by="stg.pad")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        d = op.integer("dim", 0)
        return [np.take(args[0], _places(op, ctx, op.result.tensor.dims[d]), axis=d)]


class Pad(OpDef):
    """Pads a value with zeros along a dimension of `size` elements, of which it takes those from
    `start` on; a copy, no FLOPs. If the operand is split along it, each rank puts its part in its
    place, and the result is a partial sum."""

    name = "stg.pad"
    operands = ("x",)
    traits = (Fusible(),)
    params = (_DIM, _START, Param("size", "size", "elements of the result", required=True))
    example = "%y = stg.pad[dim = 1, start = 3, size = S + 3](%x) : bf16[B, S + 3, D]"

    def rule(self, op: Operation) -> Rule:
        return _resized(op, 1)

    def verify(self, op: Operation) -> Iterator[str]:
        x = op.operands[0].tensor
        start = op.expr("start", ZERO)
        left = op.expr("size") - start - x.shape[op.integer("dim", 0)]
        if left.value is not None and left.value < 0:
            yield f"puts {x} at {start} of {op.expr('size')} elements"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        size = op.operands[0].tensor.shape[op.integer("dim", 0)]
        return gradients(b, op, grads, {"size": size}, by="stg.slice")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, d = args[0], op.integer("dim", 0)
        shape = [ctx.size(op.expr("size")) if i == d else n for i, n in enumerate(x.shape)]
        out, places = np.zeros(shape), _places(op, ctx, op.operands[0].tensor.dims[d])
        np.moveaxis(out, d, 0)[places] = np.moveaxis(x, d, 0)
        return [out]


def _resized(op: Operation, wide: int) -> Rule:
    """The rule of an op that gives one dimension another size. The dimension of the operand
    (`wide` = 0) or of the result (1) must not be split."""
    x = op.operands[0]
    rank = x.tensor.rank
    d, text = dimension(op, x, 0, rank), letters(rank + 1)
    row, new = text[:rank], text[rank]
    target = row[:d] + new + row[d + 1 :]
    sizes = {new: op.expr("size")}
    return make_rule(f"{row}->{target}", whole=new if wide else row[d], linear=[0], sizes=sizes)


def _places(op: Operation, ctx: NumericContext, part: Dim) -> Array:
    """The indices, in the longer dimension, of the local elements of the shorter one."""
    return np.asarray(ctx.positions(part)) + ctx.size(op.expr("start", ZERO))


_ALONG = Param("dim", "int", "the dimension (default 1)")
_AT = Param("at", "size", "the position, the same for all rows")


class _ByPosition(OpDef):
    operands = ("x", "where*")

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) + ("at" in op.attrs) != 2:
            yield "expects either 'at' or one operand with positions"


class Take(_ByPosition):
    """One position along dimension `dim`: the CLS token with `at = 0`, or the position that the
    operand `where` has for each index before the dimension, such as that of the EOS token.

    No FLOPs. Over a split dimension a rank without the position returns zeros, and the result is a
    partial sum: the result is reduced instead of gathering the sequence.
    """

    name = "stg.take"
    params = (_ALONG, _AT)
    example = "%c = stg.take[at = 0](%x) : bf16[B, D]"

    def rule(self, op: Operation) -> Rule:
        x = op.operands[0]
        d, row = dimension(op, x, 1, x.tensor.rank), letters(x.tensor.rank)
        where = [row[:d]] * (len(op.operands) - 1)
        return make_rule(",".join([row, *where]) + f"->{row[:d]}{row[d + 1 :]}")

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes * 2

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[op.integer("dim", 1)] if operand else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        size = op.operands[0].tensor.shape[op.integer("dim", 1)]
        return gradients(b, op, [*grads, *op.operands[1:]], {"size": size}, by="stg.put")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, d = args[0], op.integer("dim", 1)
        chosen = _chosen(op, ctx, op.operands[0].tensor.dims[d], x.shape[:d], args[1:])
        chosen = chosen.reshape(chosen.shape + (1,) * (x.ndim - d - 1))
        return [np.where(chosen, x, 0.0).sum(d)]


class Put(_ByPosition):
    """Zeros with a new dimension of `size`, and x at one position of it: the gradient of
    `stg.take`."""

    name = "stg.put"
    params = (_ALONG, _AT, Param("size", "size", "the size of the new dimension", required=True))
    example = "%dx = stg.put[at = 0, size = S](%dc) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        x = op.operands[0]
        rank = x.tensor.rank
        d, text = dimension(op, x, 1, rank + 1), letters(rank + 1)
        row, new = text[:rank], text[rank]
        left = ",".join([row, *[row[:d]] * (len(op.operands) - 1)])
        return make_rule(f"{left}->{row[:d]}{new}{row[d:]}", sizes={new: op.expr("size")})

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("size") if operand else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, d = args[0], op.integer("dim", 1)
        chosen = _chosen(op, ctx, op.result.tensor.dims[d], x.shape[:d], args[1:])
        chosen = chosen.reshape(chosen.shape + (1,) * (x.ndim - d))
        return [np.where(chosen, np.expand_dims(x, d), 0.0)]


def _chosen(
    op: Operation, ctx: NumericContext, along: Dim, lead: tuple[int, ...], where: Sequence[Array]
) -> Array:
    """A mask of the local positions along the dimension, [*lead, positions]: true where `stg.take`
    reads and `stg.put` writes."""
    at = where[0] if where else np.full(lead, ctx.size(op.expr("at")))
    return np.asarray(at)[..., None] == np.asarray(ctx.positions(along))


_CONCAT_DIM = Param("dim", "int", "the dimension (default: the last one)")


class Concat(OpDef):
    """Concatenates its operands along a dimension; copies, no FLOPs."""

    name = "stg.concat"
    traits = (Fusible(),)
    operands = ("x*",)
    params = (_CONCAT_DIM,)
    example = "%y = stg.concat(%x, %h) : bf16[B, S, 2*D]"

    def rule(self, op: Operation) -> Rule:
        whole, parts = _concat_letters(op, len(op.operands))
        d = _concat_dim(op)
        size = sum((v.tensor.shape[d] for v in op.operands if v.tensor.rank > d), ZERO)
        text = ",".join(whole.replace("Z", p) for p in parts) + f"->{whole}"
        return make_rule(text, exchanged=f"{parts}Z", linear=range(len(parts)), sizes={"Z": size})

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        sizes = tuple(v.tensor.shape[_concat_dim(op)] for v in op.operands)
        return gradients(b, op, grads, {"sizes": sizes}, by="stg.cut")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.concatenate(args, axis=_concat_dim(op))]


class Cut(OpDef):
    """Splits a dimension into consecutive parts of these sizes; the results are views."""

    name = "stg.cut"
    operands = ("x",)
    results = ("part*",)
    traits = (View(),)
    params = (Param("sizes", "sizes", "the sizes of the parts", required=True), _CONCAT_DIM)
    example = "%p, %q = stg.cut[sizes = (K, D - K)](%x) : (bf16[B, S, K], bf16[B, S, D - K])"

    def rule(self, op: Operation) -> Rule:
        sizes = op.exprs("sizes")
        whole, parts = _concat_letters(op, len(sizes))
        text = f"{whole}->" + ",".join(whole.replace("Z", p) for p in parts)
        known = dict(zip(parts, sizes, strict=True))
        return make_rule(text, exchanged=f"{parts}Z", linear=[0], sizes=known)

    def verify(self, op: Operation) -> Iterator[str]:
        whole, total = op.operands[0].tensor.shape[_concat_dim(op)], sum(op.exprs("sizes"), ZERO)
        if not same(whole, total):
            yield f"expects parts that add up to {whole}, found {total}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, all_present(op, grads), by="stg.concat")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        ends = np.cumsum([ctx.size(size) for size in op.exprs("sizes")])
        return np.split(args[0], ends[:-1], axis=_concat_dim(op))


def _concat_dim(op: Operation) -> int:
    """The dimension that the op concatenates or splits."""
    x = op.operands[0]
    return dimension(op, x, x.tensor.rank - 1, max(x.tensor.rank, 1))


def _concat_letters(op: Operation, parts: int) -> tuple[str, str]:
    """The letters of the whole shape, with Z for the dimension of the parts, and one letter for
    each part."""
    rank = op.operands[0].tensor.rank
    text = letters(max(rank - 1, 0) + parts)
    d, lead = _concat_dim(op), text[: max(rank - 1, 0)]
    return f"{lead[:d]}Z{lead[d:]}", text[len(lead) :]
