"""Each token sees the one before it: the shift of RWKV, and its gradient, the shift back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import const
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir_spec.ops.causal_conv import halo, inner_halo
from stagec.ir_spec.ops.scan_base import from_parts, to_parts


class Shift(OpDef):
    """The value of the token before, 0 for the first one; with `reverse` of the one behind.

    A copy, no FLOPs. Over a split sequence, each rank sends its last token to the next one; then
    the second operand is that token, of each part.
    """

    name = "stg.shift"
    operands = ("x", "edge*")
    params = (Param("reverse", "flag", "the token behind"),)
    example = "%p = stg.shift(%x) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        if len(op.operands) == 1:
            c = "cdefg"[: op.operands[0].tensor.rank - 2]
            return make_rule(f"bs{c}->bs{c}", special="s", linear=[0])
        c = "cdefg"[: op.operands[0].tensor.rank - 3]
        return make_rule(f"bzs{c},bzh{c}->bzs{c}", whole="sh")

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        attrs: dict[str, RawAttr] = {} if op.flag("reverse") else {"reverse": True}
        return [dy and b.value("stg.shift", [dy], attrs, hint=op.operands[0].prefixed("d_"))]

    def partition(
        self, b: Builder, op: Operation, special: Mapping[str, tuple[str, ...]]
    ) -> Sequence[Value]:
        text = "bs" + "cdefg"[: op.operands[0].tensor.rank - 2]
        x = to_parts(b, op.operands[0], text, special["s"])
        edge = halo(b, x, const(2), special["s"], -1 if op.flag("reverse") else 1)
        attrs: dict[str, RawAttr] = {"reverse": True} if op.flag("reverse") else {}
        y = b.value(op.name, [x, edge], attrs, hint=f"{op.result.name}_parts")
        return [from_parts(b, y, text, op.result.name)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, back = args[0], op.flag("reverse")
        axis = len(args)  # parts stand before the sequence
        edge = np.zeros_like(np.take(x, [0], axis))
        if len(args) == 2:
            edge = inner_halo(op, ctx, 0, args[1], first=not back)
        kept = np.take(x, range(1, x.shape[axis]) if back else range(x.shape[axis] - 1), axis)
        return [np.concatenate([kept, edge] if back else [edge, kept], axis)]


OPS = (Shift(),)
