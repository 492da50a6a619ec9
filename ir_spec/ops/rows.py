"""Ops over rows of the last dimension, such as norms and softmax.

Over a split last dimension each rank computes statistics of its part of a row, one all_reduce
combines those of all parts, and the op uses them on its part:

    %part = stg.einsum["abc,abc->ab", to = f32](%x, %x) : f32[B, S | sum(tp)]
    %squares = stg.all_reduce[over = tp](%part) : f32[B, S]
    %n = stg.rmsnorm(%x, %scale, %squares) : bf16[B, S, D@tp]
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import OpDef, Sizes, Splits
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import Fusible, Trait

Axes = tuple[str, ...]


class RowOp(OpDef):
    """Base of ops over rows of the last dimension.

    `signature` has a letter for each operand and for each result: `x` for rows, `w` for a vector of
    the last `vector_rank` dimensions. `sums` more operands, with one number for each row, may give
    the statistics of the rows; without them the op computes them itself. `costs` are the FLOPs per
    element without and with given statistics.
    """

    signature = ("x", "x")
    sums = 1
    costs = (0, 0)
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(rows=True),)

    def rule(self, op: Operation) -> Rule:
        row = letters(op.operands[0].tensor.rank)
        table = {"x": row, "w": row[-self.vector_rank(op) :]}
        given = [row[:-1]] * len(self.given(op))
        left, right = ([table[c] for c in side] for side in self.sides(op))
        text = ",".join(left + given) + "->" + ",".join(right)
        return make_rule(text, special="" if given else row[-1:])

    def sides(self, op: Operation) -> tuple[str, str]:
        """The signature of this operation, with the optional vectors that it has."""
        return self.signature

    def vector_rank(self, op: Operation) -> int:
        """The number of dimensions of its vectors."""
        return 1

    def given(self, op: Operation) -> Sequence[Value]:
        """The operands that are statistics; empty if the op computes them itself."""
        return op.operands[len(self.sides(op)[0]) :]

    def verify(self, op: Operation) -> Iterator[str]:
        if len(self.given(op)) not in (0, self.sums):
            yield f"expects {self.sums} statistics of its rows or none, found {len(self.given(op))}"

    def saved(self, op: Operation) -> int:
        """FLOPs per element that it saves because an optional vector is missing."""
        return 0

    def flops(self, op: Operation, n: Sizes) -> Expr:
        row = letters(op.operands[0].tensor.rank)
        cost = self.costs[bool(self.given(op))] - self.saved(op)
        return product(n[f] for f in row) * cost

    def plain(self, op: Operation) -> Sequence[Value]:
        """Its operands, if it computes its statistics itself. Raises `DiagnosticError` if not."""
        if self.given(op):
            raise op.error(
                f"'{op.name}' has no gradient when its statistics are operands",
                remedy="leave the statistics out: the op computes them itself",
            )
        return op.operands

    def statistics(self, b: Builder, op: Operation, over: Axes) -> Sequence[Value]:
        """Build the statistics of rows that are split over these axes."""
        raise NotImplementedError

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        (over,) = special.values()
        operands = [*op.operands, *self.statistics(b, op, over)]
        return b.op(op.name, operands, op.attrs, names=[v.name for v in op.results]).results


def row_dot(b: Builder, x: Value, y: Value, hint: str) -> Value:
    """The dot product of each row of x with the same row of y, [...], in fp32."""
    row = letters(x.tensor.rank)
    spec = f"{row},{row}->{row[:-1]}"
    return b.value("stg.einsum", [x, y], {"spec": spec, "to": "f32"}, hint=hint)


def row_sum(b: Builder, x: Value, hint: str) -> Value:
    """The sum of each row, [...], in fp32."""
    row = letters(x.tensor.rank)
    if x.tensor.dtype != "f32":
        x = b.value("stg.cast", [x], {"to": "f32"}, hint=f"{hint}_wide")
    return b.value("stg.sum", [x], {"spec": f"{row}->{row[:-1]}"}, hint=hint)


def all_reduced(
    b: Builder, parts: Sequence[Value], over: Axes, kind: str = "sum"
) -> Sequence[Value]:
    """The statistics of whole rows from those of their parts, by one all_reduce."""
    attrs: dict[str, RawAttr] = {"over": over}
    if kind != "sum":
        attrs["kind"] = kind
    return b.op("stg.all_reduce", parts, attrs, names=[f"{v.name}_r" for v in parts]).results


def row_length(op: Operation, ctx: NumericContext) -> int:
    """The number of elements of a whole row."""
    return ctx.size(op.operands[0].tensor.shape[-1])
