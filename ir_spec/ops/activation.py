"""Activations and dropout, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, fraction
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import Fusible
from stagec.ir_spec.ops.base import Elementwise, need_result, pointwise, work


class Activation(Elementwise):
    """Base of activations `y = f(x)` whose gradient op is `<name>_grad(dy, x)`."""

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        x = op.operands[0]
        return [dy and b.value(f"{op.name}_grad", [dy, x], hint=x.prefixed("d_"))]


class Gelu(Activation):
    """GeLU in its tanh form (arXiv 1606.08415), 8 FLOPs per element."""

    name = "stg.gelu"
    cost = 8
    example = "%y = stg.gelu(%x) : bf16[B]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = args[0]
        return [0.5 * x * (1 + np.tanh(_GELU * (x + 0.044715 * x**3)))]


class GeluGrad(Elementwise):
    """Gradient of `stg.gelu`, 14 FLOPs per element."""

    name = "stg.gelu_grad"
    cost = 14
    operands = ("dy", "x")
    example = "%dx = stg.gelu_grad(%dy, %x) : bf16[B]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x = args
        t = np.tanh(_GELU * (x + 0.044715 * x**3))
        return [dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _GELU * (1 + 3 * 0.044715 * x * x))]


_GELU = float(np.sqrt(2 / np.pi))


class Silu(Activation):
    """SiLU, x times its sigmoid; 3 FLOPs per element."""

    name = "stg.silu"
    cost = 3
    example = "%y = stg.silu(%x) : bf16[B]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] / (1 + np.exp(-args[0]))]


class SiluGrad(Elementwise):
    """Gradient of `stg.silu`, 7 FLOPs per element."""

    name = "stg.silu_grad"
    cost = 7
    operands = ("dy", "x")
    example = "%dx = stg.silu_grad(%dy, %x) : bf16[B]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, x = args
        return [dy * silu_derivative(x)]


def silu_derivative(x: Array) -> Array:
    """d silu(x) / dx."""
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


class Swiglu(Activation):
    """silu(gate) * up (arXiv 2002.05202); dimension 1, of size 2, holds gate and up. 4 FLOPs per
    result."""

    name = "stg.swiglu"
    operands = ("gate_up",)
    example = "%m = stg.swiglu(%gu) : bf16[B, S, F]"

    def rule(self, op: Operation) -> Rule:
        return make_rule(_packed(op.operands[0].tensor.rank - 1, "{packed}->{plain}"), whole="z")

    def verify(self, op: Operation) -> Iterator[str]:
        shape = op.operands[0].tensor.shape
        if len(shape) < 2 or shape[1] != 2:
            yield f"dimension 1 holds gate and up, so it must be 2: {op.operands[0].type}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, 4, self.rule(op)) / n["z"]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        gate, up = args[0][:, 0], args[0][:, 1]
        return [gate / (1 + np.exp(-gate)) * up]


class SwigluGrad(OpDef):
    """Gradient of `stg.swiglu`, 10 FLOPs per element of dy."""

    name = "stg.swiglu_grad"
    traits = (Fusible(),)
    operands = ("dy", "gate_up")
    example = "%dgu = stg.swiglu_grad(%dm, %gu) : bf16[B, 2, S, F]"

    def rule(self, op: Operation) -> Rule:
        return make_rule(
            _packed(op.operands[0].tensor.rank, "{plain},{packed}->{packed}"), whole="z"
        )

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, 10, self.rule(op)) / n["z"]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, (gate, up) = args[0], (args[1][:, 0], args[1][:, 1])
        silu = gate / (1 + np.exp(-gate))
        return [np.stack([dy * up * silu_derivative(gate), dy * silu], axis=1)]


def _packed(rank: int, text: str) -> str:
    plain = letters(rank)
    return text.format(plain=plain, packed=plain[0] + "z" + plain[1:])


class Dropout(Elementwise):
    """Zeroes elements with probability p and scales the rest; the second result is the 1-byte mask.

    The mask is a function of the seed, the layer and the global index, so it does not depend on
    placement.
    """

    name = "stg.dropout"
    cost = 2
    results = ("result", "mask?")
    params = (
        Param("p", "ratio", "the probability of a zero", required=True),
        Param("seed", "int", "tells one dropout from another (default 0)"),
    )
    example = "%y, %mask = stg.dropout[p = 1/10](%x) : (bf16[B], u8[B])"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, 2)

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "u8"]

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        dy, x = grads[0], op.operands[0]
        if dy is None:
            return [None]
        return [
            b.value(
                "stg.dropout_grad",
                [dy, need_result(op, 1, "mask")],
                {"p": op.attrs["p"]},
                hint=x.prefixed("d_"),
            )
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, p = args[0], float(fraction(op.expr("p")))
        index = np.full(
            x.shape, op.integer("seed", 0) * 7919 + ctx.iteration * 104729 + 1, dtype=np.uint64
        )
        for d, dim in enumerate(op.operands[0].tensor.dims):
            along = np.asarray(ctx.positions(dim), dtype=np.uint64)
            index = index * np.uint64(6364136223846793005) + along.reshape(
                [-1 if i == d else 1 for i in range(x.ndim)]
            )
        index ^= index >> np.uint64(31)
        index *= np.uint64(0x9E3779B97F4A7C15)
        mask = ((index >> np.uint64(11)).astype(np.float64) / 2.0**53 >= p).astype(np.uint8)
        return [x * mask / (1 - p), mask]


class DropoutGrad(Elementwise):
    """Gradient of `stg.dropout` from its mask, 2 FLOPs per element."""

    name = "stg.dropout_grad"
    cost = 2
    operands = ("dy", "mask")
    params = (Param("p", "ratio", "the probability of a zero", required=True),)
    example = "%dx = stg.dropout_grad[p = 1/10](%dy, %mask) : bf16[B]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] * args[1] / (1 - float(fraction(op.expr("p"))))]


OPS = (
    Gelu(),
    GeluGrad(),
    Silu(),
    SiluGrad(),
    Swiglu(),
    SwigluGrad(),
    Dropout(),
    DropoutGrad(),
)
