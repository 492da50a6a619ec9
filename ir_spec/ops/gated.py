"""Gated activations (arXiv 2002.05202): a function of one half of the operand times the other half.

Dimension 1, of size 2, holds gate and up. Backward computes from them again; only they are stashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation
from stagec.ir.expr import Expr, fraction
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import Fusible, Trait
from stagec.ir_spec.ops.base import gradients, work
from stagec.ir_spec.ops.curves import FORM, gelu_form, sigmoid

_CLAMPED = (
    Param("slope", "ratio", "the gate is times sigmoid(slope * gate) (default 1)"),
    Param("limit", "ratio", "gate is at most this, up is within +- this (default: no limit)"),
    Param("shift", "ratio", "is added to up (default 0)"),
)


class Gated(OpDef):
    """Base of gated activations, whose gradient op is `<name>_grad(dy, gate_up)`."""

    operands = ("gate_up",)
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(),)

    def rule(self, op: Operation) -> Rule:
        return make_rule(_packed(op.operands[0].tensor.rank - 1, "{packed}->{plain}"), whole="z")

    def verify(self, op: Operation) -> Iterator[str]:
        shape = op.operands[0].tensor.shape
        if len(shape) < 2 or shape[1] != 2:
            yield f"dimension 1 holds gate and up, so it must be 2: {op.operands[0].type}"

    def cost(self, op: Operation) -> int:
        """FLOPs per element of the result."""
        raise NotImplementedError

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, self.cost(op), self.rule(op)) / n["z"]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, *op.operands])


class GatedGrad(OpDef):
    """Base of gradients of gated activations."""

    operands = ("dy", "gate_up")
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(),)

    def rule(self, op: Operation) -> Rule:
        return make_rule(
            _packed(op.operands[0].tensor.rank, "{plain},{packed}->{packed}"), whole="z"
        )

    def cost(self, op: Operation) -> int:
        """FLOPs per element of dy."""
        raise NotImplementedError

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, self.cost(op), self.rule(op)) / n["z"]


def _packed(rank: int, text: str) -> str:
    plain = letters(rank)
    return text.format(plain=plain, packed=plain[0] + "z" + plain[1:])


class Swiglu(Gated):
    """silu(gate) * up. 4 FLOPs per result.

    With `slope`, `limit` or `shift` it is gate * sigmoid(slope * gate) * (up + shift) of clamped
    gate and up, as in gpt-oss: one more FLOP for the slope, one for the shift, 3 for the limit.
    """

    name = "stg.swiglu"
    params = _CLAMPED
    example = "%m = stg.swiglu(%gu) : bf16[B, S, F]"

    def cost(self, op: Operation) -> int:
        return 4 + _extra(op)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        gate, up = _clamped(op, args[0])
        return [gate * sigmoid(_ratio(op, "slope", 1) * gate) * up]


class SwigluGrad(GatedGrad):
    """Gradient of `stg.swiglu`, 10 FLOPs per element of dy; as many more as forward has for slope
    and shift, and 5 for the limit."""

    name = "stg.swiglu_grad"
    params = _CLAMPED
    example = "%dgu = stg.swiglu_grad(%dm, %gu) : bf16[B, 2, S, F]"

    def cost(self, op: Operation) -> int:
        return 10 + _extra(op) + (2 if "limit" in op.attrs else 0)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, packed = args
        (gate, up), slope = _clamped(op, packed), _ratio(op, "slope", 1)
        s = sigmoid(slope * gate)
        dgate, dup = dy * up * s * (1 + slope * gate * (1 - s)), dy * gate * s
        if "limit" in op.attrs:
            limit = _ratio(op, "limit", 0)
            dgate = dgate * (packed[:, 0] <= limit)
            dup = dup * (np.abs(packed[:, 1]) <= limit)
        return [np.stack([dgate, dup], axis=1)]


def _extra(op: Operation) -> int:
    return sum(
        cost for name, cost in (("slope", 1), ("limit", 3), ("shift", 1)) if name in op.attrs
    )


def _ratio(op: Operation, name: str, default: float) -> float:
    return float(fraction(op.expr(name))) if name in op.attrs else default


def _clamped(op: Operation, packed: Array) -> tuple[Array, Array]:
    """The gate, and what it is multiplied by."""
    gate, up = packed[:, 0], packed[:, 1]
    if "limit" in op.attrs:
        limit = _ratio(op, "limit", 0)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate, up + _ratio(op, "shift", 0)


class Geglu(Gated):
    """gelu(gate) * up. FLOPs per result: one more than those of that form of `stg.gelu`."""

    name = "stg.geglu"
    params = (FORM,)
    example = "%m = stg.geglu(%gu) : bf16[B, S, F]"

    def cost(self, op: Operation) -> int:
        return gelu_form(op).cost + 1

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [gelu_form(op).value(args[0][:, 0]) * args[0][:, 1]]


class GegluGrad(GatedGrad):
    """Gradient of `stg.geglu`. FLOPs per element of dy: 3 more than those of `stg.gelu_grad`."""

    name = "stg.geglu_grad"
    params = (FORM,)
    example = "%dgu = stg.geglu_grad(%dm, %gu) : bf16[B, 2, S, F]"

    def cost(self, op: Operation) -> int:
        return gelu_form(op).grad_cost + 3

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, (gate, up), form = args[0], (args[1][:, 0], args[1][:, 1]), gelu_form(op)
        return [np.stack([dy * up * form.derivative(gate), dy * form.value(gate)], axis=1)]
