"""The token shift of RWKV: each token receives the value of the previous one; the gradient is the
reverse shift."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, const
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.types import Dim, TensorType
from stagec.ir_spec.ops.base import STATE, gradients, no_gradient
from stagec.ir_spec.ops.causal_conv import halo, inner_halo, parts_from_state
from stagec.ir_spec.ops.sequence_parts import from_parts, to_parts


class Shift(OpDef):
    """The value of the previous token, 0 for the first one; with `reverse`, of the next token.

    A copy, no FLOPs. Over a split sequence, each rank sends its last token to the next one; the
    second operand is then that token for each part. With `state`, it is the token before the first
    one ([B, 1, channels...]), and the last token is a result in the same buffer.
    """

    name = "stg.shift"
    operands = ("x", "edge*")
    results = ("result", "last?")
    params = (
        Param("reverse", "flag", "the token behind"),
        STATE,
        Param("parts", "flag", "with 'state': tokens stand behind the parts of a sequence"),
    )
    example = "%p = stg.shift(%x) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        if op.flag("state") or len(op.operands) == 1:
            c = "cdefg"[: op.operands[0].tensor.rank - 2]
            if op.flag("parts"):
                return make_rule(f"bzs{c[1:]},bzo{c[1:]}->bzs{c[1:]},bzo{c[1:]}", whole="so")
            if op.flag("state"):
                return make_rule(f"bs{c},bo{c}->bs{c},bo{c}", special="s", whole="o")
            return make_rule(f"bs{c}->bs{c}", special="s", linear=[0])
        c = "cdefg"[: op.operands[0].tensor.rank - 3]
        return make_rule(f"bzs{c},bzh{c}->bzs{c}", whole="sh")

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("state") and op.flag("reverse"):
            yield "expects 'state' or 'reverse', found both"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [v.tensor.dtype for v in op.operands][: 1 + op.flag("state")]

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keep the last token as state, in fp32."""
        x = op.operands[0].tensor
        if op.flag("reverse") or not step.is_tokens(x.shape[1]):
            return super().serve(step, op)
        return step.carry(op, TensorType("f32", (x.dims[0], Dim(ONE), *x.dims[2:])))

    def reuses(self, op: Operation, result: int) -> int | None:
        return 1 if result == 1 else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        no_gradient(op)
        return gradients(b, op, [grads[0]], {"reverse": not op.flag("reverse")}, by=op.name)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        text = "bs" + "cdefg"[: op.operands[0].tensor.rank - 2]
        if op.flag("state"):
            x, before, kept = parts_from_state(b, op, ONE, special["s"])
            names, how = [f"{r.name}_parts" for r in op.results], {"state": True, "parts": True}
            shifted = b.op(op.name, [x, before], how, names=names).results[0]
            return [from_parts(b, shifted, text, op.results[0].name), kept]
        x = to_parts(b, op.operands[0], text, special["s"])
        edge = halo(b, x, const(2), special["s"], -1 if op.flag("reverse") else 1)
        attrs: dict[str, RawAttr] = {"reverse": True} if op.flag("reverse") else {}
        y = b.value(op.name, [x, edge], attrs, hint=f"{op.result.name}_parts")
        return [from_parts(b, y, text, op.result.name)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, back = args[0], op.flag("reverse")
        if op.flag("state"):
            place = 2 if op.flag("parts") else 1
            rows = np.concatenate([args[1], x], place)
            return np.split(rows, [x.shape[place]], place)
        axis = len(args)  # parts stand before the sequence
        edge = np.zeros_like(np.take(x, [0], axis))
        if len(args) == 2:
            edge = inner_halo(op, ctx, 0, args[1], first=not back)
        kept = np.take(x, range(1, x.shape[axis]) if back else range(x.shape[axis] - 1), axis)
        return [np.concatenate([kept, edge] if back else [edge, kept], axis)]
