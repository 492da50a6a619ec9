"""Contractions and element-wise ops: einsum, add, mul, scale, cast, activations, dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Quoted, Value
from stagec.ir.expr import ZERO, Expr, fraction, product
from stagec.ir.opdef import Array, NumericContext, OpDef, Param, Sizes, factor_sizes
from stagec.ir.rule import Rule, letters, make_rule, parse_rule, shape_text
from stagec.ir.types import FLOATS

SPEC = Param("spec", "str", 'the index rule, such as "bsd,dhk->bshk"', positional=True)


def pointwise(
    op: Operation, results: int = 1, *, linear: bool = False, operands: int | None = None
) -> Rule:
    """The rule of an op whose operands and results all have the shape of operand 0."""
    text = letters(op.operands[0].tensor.rank)
    count = len(op.operands) if operands is None else operands
    joint = range(count) if linear else ()
    return make_rule(",".join([text] * count) + "->" + ",".join([text] * results), linear=joint)


def work(n: Sizes, per_element: int, rule: Rule) -> Expr:
    """`per_element` FLOPs for each point of the rule's index space."""
    return product(n[f] for f in rule.factors) * per_element


class Elementwise(OpDef):
    """Base: operands and result of one shape, `cost` FLOPs per element."""

    cost: ClassVar[int] = 1
    linear: ClassVar[bool] = False
    operands: ClassVar[tuple[str, ...]] = ("x",)

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, linear=self.linear)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, self.cost, self.rule(op))


class Einsum(OpDef):
    """A contraction, `einsum` of two operands; the text is its index rule.

    FLOPs: two per point of the index space if something is contracted, else one.
    """

    name = "stg.einsum"
    operands = ("left", "right")
    params = (Param("spec", "str", SPEC.doc, required=True, positional=True),)
    example = '%q = stg.einsum["bsd,dhk->bshk"](%x, %w) : bf16[B, S, H, K]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"))

    def verify(self, op: Operation) -> Iterator[str]:
        rule = self.rule(op)
        if len(rule.results) != 1:
            yield f"einsum has one result, '{op.text('spec')}' has {len(rule.results)}"
            return
        both = {f for shape in rule.operands for g in shape for f in g}
        lost = sorted({f for g in rule.results[0] for f in g} - both)
        if lost:
            yield f"factor '{lost[0]}' of the result is in no operand"
        dtypes = {v.tensor.dtype for v in op.operands}
        if len(dtypes) > 1:
            yield f"operands have different element types: {', '.join(sorted(dtypes))}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        rule = self.rule(op)
        return work(n, 2 if rule.contracted(0) else 1, rule)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n) if self.rule(op).contracted(0) else ZERO

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        if dy is None:
            return [None, None]
        (left, right), (out,) = parse_rule(op.text("spec"))
        x, w = op.operands
        a, c, o = shape_text(left), shape_text(right), shape_text(out)
        dx = b.value("stg.einsum", [dy, w], {"spec": Quoted(f"{o},{c}->{a}")}, hint=f"d_{x.name}")
        dw = b.value("stg.einsum", [x, dy], {"spec": Quoted(f"{a},{o}->{c}")}, hint=f"d_{w.name}")
        return [dx, dw]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.einsum(op.text("spec"), *args, optimize=True)]


class Add(OpDef):
    """Sum of any number of values; a rule such as "bsf,f->bsf" states a broadcast (a bias).

    Partial sums pass if all operands are partial over the same axes.
    """

    name = "stg.add"
    operands = ("x",)
    variadic = True
    params = (SPEC,)
    example = "%r = stg.add(%h, %o) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        if "spec" in op.attrs:
            return make_rule(op.text("spec"), linear=range(len(op.operands)))
        return pointwise(op, linear=True)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, len(op.operands) - 1, self.rule(op))

    def verify(self, op: Operation) -> Iterator[str]:
        dtypes = {v.tensor.dtype for v in op.operands}
        if len(dtypes) > 1:
            yield f"operands have different element types: {', '.join(sorted(dtypes))}"

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        if dy is None or "spec" not in op.attrs:
            return [dy] * len(op.operands)
        shapes, (out,) = parse_rule(op.text("spec"))
        return [
            dy
            if shape == out
            else b.value(
                "stg.sum",
                [dy],
                {"spec": Quoted(f"{shape_text(out)}->{shape_text(shape)}")},
                hint=f"d_{v.name}",
            )
            for v, shape in zip(op.operands, shapes, strict=True)
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        if "spec" not in op.attrs:
            return [sum(args[1:], args[0])]
        shapes, (out,) = parse_rule(op.text("spec"))
        return [
            sum(
                (broadcast(a, s, out) for a, s in zip(args[1:], shapes[1:], strict=True)),
                broadcast(args[0], shapes[0], out),
            )
        ]


def broadcast(
    array: Array, shape: tuple[tuple[str, ...], ...], out: tuple[tuple[str, ...], ...]
) -> Array:
    """An operand with its dimensions where the result has them, 1 elsewhere."""
    order = [shape.index(g) for g in out if g in shape]
    moved = np.transpose(array, order)
    return moved[tuple(slice(None) if g in shape else None for g in out)]


class Sum(OpDef):
    """Sum over the factors that the result does not have, such as a bias gradient "bsf->f"."""

    name = "stg.sum"
    operands = ("x",)
    params = (Param("spec", "str", SPEC.doc, required=True, positional=True),)
    example = '%db = stg.sum["bsf->f"](%dy) : bf16[F]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"), linear=[0])

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, 1, self.rule(op))

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        (left,), (right,) = parse_rule(op.text("spec"))
        sizes = factor_sizes(op, self.rule(op))
        new = [g for g in left if g not in right]
        attrs: dict[str, RawAttr] = {
            "spec": Quoted(f"{shape_text(right)}->{shape_text(left)}"),
            "sizes": tuple(sizes[f] for g in new for f in g),
        }
        return [dy and b.value("stg.broadcast", [dy], attrs, hint=f"d_{op.operands[0].name}")]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.einsum(op.text("spec"), *args)]


class Broadcast(OpDef):
    """Repeats a value along new dimensions, "f->bsf"; `sizes` are theirs, in order."""

    name = "stg.broadcast"
    operands = ("x",)
    params = (
        Param("spec", "str", SPEC.doc, required=True, positional=True),
        Param("sizes", "sizes", "the sizes of the new dimensions", required=True),
    )
    example = '%y = stg.broadcast["f->bf", sizes = B](%x) : bf16[B, F]'

    def rule(self, op: Operation) -> Rule:
        (left,), (right,) = parse_rule(op.text("spec"))
        new = [f for g in right if g not in left for f in g]
        given = op.attrs["sizes"]
        sizes = [v for v in (given if isinstance(given, tuple) else ()) if isinstance(v, Expr)]
        return make_rule(op.text("spec"), linear=[0], sizes=dict(zip(new, sizes, strict=True)))

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        (left,), (right,) = parse_rule(op.text("spec"))
        spec = Quoted(f"{shape_text(right)}->{shape_text(left)}")
        hint = f"d_{op.operands[0].name}"
        return [dy and b.value("stg.sum", [dy], {"spec": spec}, hint=hint)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (left,), (right,) = parse_rule(op.text("spec"))
        shape = [ctx.size(d.local) for d in op.result.tensor.dims]
        return [np.broadcast_to(broadcast(args[0], left, right), shape)]


class Mul(Elementwise):
    """Element-wise product."""

    name = "stg.mul"
    operands = ("x", "y")
    example = "%z = stg.mul(%x, %y) : bf16[B]"

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        if dy is None:
            return [None, None]
        x, y = op.operands
        return [
            b.value("stg.mul", [dy, y], hint=f"d_{x.name}"),
            b.value("stg.mul", [dy, x], hint=f"d_{y.name}"),
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] * args[1]]


class Scale(Elementwise):
    """Multiplies by a constant fraction."""

    name = "stg.scale"
    linear = True
    params = (Param("by", "ratio", "the factor", required=True),)
    example = "%y = stg.scale[by = 1/2](%x) : bf16[B]"

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        return [
            dy
            and b.value("stg.scale", [dy], {"by": op.attrs["by"]}, hint=f"d_{op.operands[0].name}")
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] * float(fraction(op.expr("by")))]


class Cast(Elementwise):
    """Changes the element type; no FLOPs, only bytes. Partial sums pass: they are reduced in the
    new type."""

    name = "stg.cast"
    cost = 0
    linear = True
    params = (Param("to", "name", "the element type", required=True, positional=True),)
    example = "%y = stg.cast[f32](%x) : f32[B]"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to")]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.text("to") not in FLOATS:
            yield f"casts to a floating-point type, found {op.text('to')}"

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        x = op.operands[0]
        return [dy and b.value("stg.cast", [dy], {"to": x.tensor.dtype}, hint=f"d_{x.name}")]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class Activation(Elementwise):
    """Base of activations `y = f(x)` whose gradient op is `<name>_grad(dy, x)`."""

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        x = op.operands[0]
        return [dy and b.value(f"{op.name}_grad", [dy, x], hint=f"d_{x.name}")]


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
    results = ("result", "mask")
    required_results = 1
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
                hint=f"d_{x.name}",
            )
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, p = args[0], float(fraction(op.expr("p")))
        index = np.full(
            x.shape, op.integer("seed", 0) * 7919 + ctx.iteration * 104729 + 1, dtype=np.uint64
        )
        for d, dim in enumerate(op.operands[0].tensor.dims):
            along = np.arange(x.shape[d], dtype=np.uint64) + np.uint64(ctx.start(dim))
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


def need_result(op: Operation, index: int, name: str) -> Value:
    """Result `index` of an op whose trailing results are optional, added if it is not there yet."""
    while len(op.results) <= index:
        types = op.definition.infer(op)
        op.add_result(f"{op.results[0].name}_{name}", types[len(op.results)])
    return op.results[index]


OPS = (
    Einsum(),
    Add(),
    Sum(),
    Broadcast(),
    Mul(),
    Scale(),
    Cast(),
    Gelu(),
    GeluGrad(),
    Silu(),
    SiluGrad(),
    Swiglu(),
    SwigluGrad(),
    Dropout(),
    DropoutGrad(),
)
