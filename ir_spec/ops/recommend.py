"""Embedding bags and the interaction of features, for recommendation (DLRM, arXiv 1906.00091)."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, const, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir_spec.ops.base import gradients

_BAGS = Param("bags", "ints", "lookups of each bag, in order")


class _Bags(OpDef):
    """Base of embedding bags and their gradient: their rules differ in the direction only."""

    params: ClassVar[tuple[Param, ...]] = (_BAGS,)

    def shapes(self, op: Operation, rows: Value, tables: int) -> tuple[str, str, str]:
        """Letters of the table, of the rows that are looked up and of the bags: v rows of x
        elements, n tables or bags, p lookups."""
        lead = letters(max(rows.tensor.rank - (2 if tables == 3 else 1), 0))
        if tables == 3:
            return "nvx", f"{lead}np", f"{lead}nx"
        return "vx", f"{lead}p", f"{lead}nx" if "bags" in op.attrs else f"{lead}x"

    def whole(self, op: Operation) -> str:
        """Bags of several sizes cannot be split."""
        return "np" if "bags" in op.attrs else ""

    def counted(self, op: Operation) -> dict[str, Expr]:
        """The number of bags, where the op states them."""
        return {"n": const(len(op.integers("bags")))} if "bags" in op.attrs else {}


class EmbeddingBag(_Bags):
    """Sums of rows of a table: those that the last dimension of `rows` names, one FLOP per element
    looked up.

    A table [V, D] gives [B, D] from rows [B, P]; N tables [N, V, D] of equally many rows give
    [B, N, D] from rows [B, N, P]. With `bags` one table holds several, one behind the other, and
    the lookups of a sample are those of its bags in turn: [B, N, D] from rows [B, P], where P is
    the sum of `bags`. Split over N each rank has whole tables (table-wise), over V a part of the
    rows and a partial sum (row-wise), over D a part of each row (column-wise).
    """

    name = "stg.embedding_bag"
    operands = ("table", "rows")
    example = "%e = stg.embedding_bag(%table, %tokens) : bf16[B, D]"

    def rule(self, op: Operation) -> Rule:
        table, rows, out = self.shapes(op, op.operands[1], op.operands[0].tensor.rank)
        sizes = self.counted(op)
        return make_rule(f"{table},{rows}->{out}", whole=self.whole(op), sizes=sizes)

    def verify(self, op: Operation) -> Iterator[str]:
        table, rows = (v.tensor for v in op.operands)
        if table.rank not in (2, 3) or ("bags" in op.attrs and table.rank == 3):
            yield f"expects a table [V, D], or [N, V, D] without 'bags', found {table}"
        elif "bags" in op.attrs:
            bags, lookups = op.integers("bags"), rows.shape[-1].value
            if min(bags) < 1:
                yield "expects bags of at least one lookup"
            if lookups is not None and lookups != sum(bags):
                yield f"expects {sum(bags)} lookups, the sum of 'bags', found {lookups}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        _, rows, _ = self.shapes(op, op.operands[1], op.operands[0].tensor.rank)
        return product(n[f] for f in rows + "x")

    def bytes_touched(self, op: Operation) -> Expr:
        table, rows = (v.tensor for v in op.operands)
        row = rows.local_elements * table.local_shape[-1]
        read = row * table.local_bytes / table.local_elements
        return read + rows.local_bytes + op.result.tensor.local_bytes

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[-2] if operand == 1 else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        table, rows = op.operands
        attrs: dict[str, RawAttr] = {"rows": table.tensor.shape[-2]}
        if table.tensor.rank == 3:
            attrs["tables"] = True
        return gradients(b, op, [rows, *grads], attrs)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        table, rows = args
        read = _looked_up(table, rows - ctx.start(op.operands[0].tensor.dims[-2]))
        if "bags" not in op.attrs:
            return [read.sum(-2)]
        ends = np.cumsum(op.integers("bags"))
        return [np.stack([part.sum(-2) for part in np.split(read, ends[:-1], axis=-2)], axis=-2)]


def _looked_up(table: Array, local: Array) -> Array:
    """The rows, [..., p, x], with zeros for those that another rank has."""
    count = table.shape[-2]
    inside, index = (local >= 0) & (local < count), np.clip(local, 0, count - 1)
    rows = table[np.arange(table.shape[0])[:, None], index] if table.ndim == 3 else table[index]
    return np.where(inside[..., None], rows, 0.0)


class EmbeddingBagGrad(_Bags):
    """Gradient of `stg.embedding_bag` with respect to the table, one FLOP per element looked up.
    With `tables` there are several of them."""

    name = "stg.embedding_bag_grad"
    operands = ("rows", "dy")
    params = (
        _BAGS,
        Param("rows", "size", "the rows of a table", required=True),
        Param("tables", "flag", "dimension 0 of the result is that of the tables"),
    )
    element_types = ("dy",)
    example = "%dt = stg.embedding_bag_grad[rows = V](%tokens, %dc) : bf16[V, D]"

    def rule(self, op: Operation) -> Rule:
        table, rows, out = self.shapes(op, op.operands[0], 3 if op.flag("tables") else 2)
        sizes = {"v": op.expr("rows")}
        return make_rule(f"{rows},{out}->{table}", whole=self.whole(op), sizes=sizes)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        _, rows, _ = self.shapes(op, op.operands[0], 3 if op.flag("tables") else 2)
        return product(n[f] for f in rows + "x")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        rows, dy = args
        out = np.zeros(ctx.shape(op.result))
        local = rows - ctx.start(op.result.tensor.dims[-2])
        inside = (local >= 0) & (local < out.shape[-2])
        if "bags" in op.attrs:
            each = np.repeat(dy, op.integers("bags"), axis=-2)
        else:
            each = np.broadcast_to(dy[..., None, :], (*rows.shape, dy.shape[-1]))
        if op.flag("tables"):
            for t, table in enumerate(out):
                mine = inside[..., t, :]
                np.add.at(table, local[..., t, :][mine], each[..., t, :, :][mine])
        else:
            np.add.at(out, local[inside], each[inside])
        return [out]


class Triangle(OpDef):
    """The elements below the diagonal of the last two dimensions, row by row: the products of the
    pairs of N features, N*(N - 1)/2 numbers. Copies, no FLOPs."""

    name = "stg.triangle"
    operands = ("x",)
    example = "%z = stg.triangle(%scores) : bf16[B, H, S*(S - 1)/2]"

    def rule(self, op: Operation) -> Rule:
        rank = op.operands[0].tensor.rank
        row = letters(rank + 1)
        size = op.operands[0].tensor.shape[-1] if rank else const(1)
        pairs = size * (size - const(1)) / const(2)
        text = f"{row[:rank]}->{row[: rank - 2]}{row[-1]}"
        return make_rule(text, whole=row[-3:], linear=[0], sizes={row[-1]: pairs})

    def verify(self, op: Operation) -> Iterator[str]:
        shape = op.operands[0].tensor.shape
        if len(shape) < 2 or shape[-1] != shape[-2]:
            yield f"expects two last dimensions of one size, found {op.operands[0].type}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, {"size": op.operands[0].tensor.shape[-1]})

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        rows, columns = np.tril_indices(args[0].shape[-1], -1)
        return [args[0][..., rows, columns]]


class TriangleGrad(OpDef):
    """Gradient of `stg.triangle`: its elements below the diagonal, zeros elsewhere."""

    name = "stg.triangle_grad"
    operands = ("dy",)
    params = (Param("size", "size", "rows and columns", required=True),)
    index = IndexRule("...p->...st", whole="pst", linear=(0,), sizes={"s": "size", "t": "size"})
    example = "%dx = stg.triangle_grad[size = S](%dz) : bf16[B, H, S, S]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        size = ctx.size(op.expr("size"))
        out = np.zeros((*args[0].shape[:-1], size, size))
        rows, columns = np.tril_indices(size, -1)
        out[..., rows, columns] = args[0]
        return [out]
