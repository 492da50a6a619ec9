"""Running sums."""

from collections.abc import Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.base import dimension, gradients, stated

_FLAGS = (
    Param("exclusive", "flag", "each sum without its own element"),
    Param("reverse", "flag", "from the last element to the first"),
)


class CumSum(OpDef):
    """Running sums along dimension `dim`, one FLOP per element.

    Over a split dimension each rank computes the running sums of its own part, and adds the total
    of the parts before it, from an all_gather of one total per rank.
    """

    name = "stg.cumsum"
    operands = ("x",)
    params = (Param("dim", "int", "the dimension", required=True), *_FLAGS)
    flops_per_point = 1
    example = "%c = stg.cumsum[dim = 1](%x) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        x = op.operands[0]
        d = dimension(op, x, 0, x.tensor.rank)
        row = letters(x.tensor.rank)
        return make_rule(f"{row}->{row}", special=row[d], linear=[0])

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, {"reverse": not op.flag("reverse")}, by=op.name)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        (over,) = special.values()
        (x,), d = op.operands, op.integer("dim")
        row, part = letters(x.tensor.rank), letters(x.tensor.rank + 1)[-1]
        whole = "".join(f"({part}{f})" if i == d else f for i, f in enumerate(row))
        cut = whole.replace("(", "").replace(")", "")
        kept = cut.replace(row[d], "")
        y, flags = op.result.name, stated(op, _FLAGS)
        count: dict[str, RawAttr] = {"factors": (part,), "sizes": (axis_size(over),)}
        spec = f"{whole}->{cut}"
        parts = b.value("stg.reshape", [x], {"spec": spec, **count}, hint=f"{x.name}_parts")
        own = b.value("stg.cumsum", [parts], {"dim": d + 1, **flags}, hint=f"{y}_own")
        spec = f"{cut}->{kept}"
        total = b.value("stg.sum", [parts], {"spec": spec}, hint=f"{y}_total")
        along: dict[str, RawAttr] = {"dim": d, "over": over}
        totals = b.value("stg.all_gather", [total], along, hint=f"{y}_totals")
        flags = {**flags, "exclusive": True}
        before = b.value("stg.cumsum", [totals], {"dim": d, **flags}, hint=f"{y}_before")
        mine = b.value("stg.all_slice", [before], along, hint=f"{y}_mine")
        spec = f"{cut},{kept}->{cut}"
        sums = b.value("stg.add", [own, mine], {"spec": spec}, hint=f"{y}_sums")
        return [b.value("stg.reshape", [sums], {"spec": f"{cut}->{whole}"}, hint=y)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        d = op.integer("dim")
        x = np.flip(args[0], d) if op.flag("reverse") else args[0]
        sums = np.cumsum(x, axis=d) - (x if op.flag("exclusive") else 0)
        return [np.flip(sums, d) if op.flag("reverse") else sums]
