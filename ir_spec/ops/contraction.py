"""Contractions, sums and products: einsum, add, sum, broadcast, mul, scale, cast."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Attr, Operation, Value
from stagec.ir.expr import ONE, ZERO, Expr, call, const, fraction, substitute
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.kernel import matrix_product
from stagec.ir.module import is_parameter, uncast
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, Shape, make_rule, parse_rule, shape_text
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Fusible, Recasts, Terminates, Trait
from stagec.ir.types import EIGHT_BITS, FLOATS, WITHOUT_SCALES
from stagec.ir_spec.ops.base import (
    ADAPTER_STEPS,
    SPEC,
    Elementwise,
    backwards,
    gradients,
    pointwise,
    present,
    stated,
    work,
)
from stagec.ir_spec.ops.comm import Collective

#: The types that `stg.quantize` casts to, and the one whose second copy is transformed.
QUANTIZED = EIGHT_BITS | WITHOUT_SCALES.keys()
#: Those with one scale for a whole tensor.
ONE_SCALE = EIGHT_BITS - WITHOUT_SCALES.keys()
HADAMARD = "f4e2m1s"
_INTO = Param("into", "flag", "the result takes the buffer of the first operand")
_TO = Param("to", "name", "the element type of the result, if not that of the operands")


class Einsum(OpDef):
    """A contraction of two operands, like `einsum` of NumPy; the text is its index rule.

    8-bit operands may have different types; `to` is the type of the result. With `grad`, the
    incoming gradient is cast to that type before it is multiplied, and a parameter that was cast is
    cast again: 8-bit copies of parameters are not kept for backward.

    FLOPs: two per point of the index space if a dimension is contracted, otherwise one. They are
    those of a matrix product if the result has a dimension that only one operand has; `sd,sd->s`, a
    sum of element-wise products, is not a matrix product.
    """

    name = "stg.einsum"
    operands = ("left", "right")
    params = (
        Param("spec", "str", SPEC.doc, required=True, positional=True),
        _TO,
        Param("grad", "name", "the element type that backward multiplies gradients in"),
        Param("quantize", "flag", "the gradient is cast by `stg.quantize`"),
        Param("as_weights", "flag", "model code casts what it takes to the type of the parameter"),
        Param("into_sum", "flag", "the kernel adds its result, a gradient, to the sum of its user"),
        Param("searched", "flag", "the same, with a kernel before it for the largest element"),
    )
    example = '%q = stg.einsum["bsd,dhk->bshk"](%x, %w) : bf16[B, S, H, K]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"), each=range(len(op.operands)))

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
        if len(dtypes) > 1 and not dtypes <= EIGHT_BITS:  # of 4 bits there is one type
            yield f"operands have different element types: {', '.join(sorted(dtypes))}"
        for name in ("to", "grad"):
            if name in op.attrs and op.text(name) not in FLOATS:
                yield f"'{name}' expects a floating-point type, found {op.text(name)}"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to", op.operands[0].tensor.dtype)]

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keys and values are cached: for scores [.., s, t] the operand with t, for a sum over t
        the operand without s."""
        rule = self.rule(op)
        sizes = [v.tensor.shape for v in op.operands]
        tokens = [
            {g[0]: d for d, (g, n) in enumerate(zip(s, z, strict=True)) if step.is_seen(n)}
            for s, z in zip(rule.operands, sizes, strict=True)
        ]
        both = [g[0] for g in rule.results[0] if any(g[0] in seen for seen in tokens)]
        keys = set(both[1:2]) | {f for seen in tokens for f in seen if f not in both}
        caches = [i for i, seen in enumerate(tokens) if len(seen) == 1 and keys & seen.keys()]
        if len(keys) != 1 or len(caches) != 1:
            return super().serve(step, op)
        ((_, dim),) = tokens[caches[0]].items()
        new = op.operands[caches[0]]
        rows = step.append(new, dim=dim)
        if rows.tensor.dtype != new.tensor.dtype:  # both operands of a product have one type
            rows = step.b.value("stg.cast", [rows], {"to": new.tensor.dtype}, hint=rows.name)
        op.set_operand(caches[0], rows)
        return op.results

    def flops(self, op: Operation, n: Sizes) -> Expr:
        rule = self.rule(op)
        return work(n, 2 if rule.contracted(0) else 1, rule)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        product = matrix_product(self.rule(op), n, op.operands[0].tensor.dtype)
        return self.flops(op, n) if product is not None else ZERO

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        dy = present(grads[0])
        (left, right), (out,) = parse_rule(op.text("spec"))
        x, w = (_cast_again(b, v) if "grad" in op.attrs else v for v in op.operands)
        if "grad" in op.attrs:
            cast, to_type = Quantize.name if op.flag("quantize") else Cast.name, op.text("grad")
            attrs: dict[str, RawAttr] = {"to": to_type}
            if op.flag("quantize"):
                attrs |= {"searched": op.flag("searched"), "hadamard": to_type == HADAMARD}
            given = {name: attr for name, attr in attrs.items() if attr}
            dy = b.value(cast, [dy], given, hint=f"{dy.name}_{to_type[:2]}")
        to, sizes = stated(op, [_TO]), factor_sizes(op, self.rule(op))
        dx = _operand_grad(b, (out, right, left), [dy, w], sizes, x.prefixed("d_"), to)
        dw = _operand_grad(b, (left, out, right), [x, dy], sizes, w.prefixed("d_"), to)
        return [dx, dw]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.einsum(op.text("spec"), *args, optimize=True)]


def _cast_again(b: Builder, value: Value) -> Value:
    """Cast a parameter again that forward has cast, so that its copy is not stashed; other values
    are returned as they are."""
    op = value.producer
    if op is None or not op.has(Recasts) or not is_parameter(uncast(op.operands[0])):
        return value
    return b.value(op.name, op.operands, attributes_again(op), hint=value.name)


def attributes_again(op: Operation) -> dict[str, Attr]:
    """The attributes of an operation that is computed again: copies of a parameter that stay are
    there then."""
    if "once" not in op.attrs:
        return dict(op.attrs)
    return {**{name: attr for name, attr in op.attrs.items() if name != "once"}, "kept": True}


def _operand_grad(
    b: Builder,
    shapes: tuple[Shape, Shape, Shape],
    operands: list[Value],
    sizes: Sizes,
    hint: str,
    to: Mapping[str, RawAttr],
) -> Value:
    """The gradient of one operand: an einsum, repeated along factors that only this operand has."""
    first, second, target = shapes
    kept = tuple(g for g in target if g in first or g in second)
    spec = f"{shape_text(first)},{shape_text(second)}->{shape_text(kept)}"
    grad = b.value("stg.einsum", operands, {"spec": spec, **to}, hint=hint)
    if kept == target:
        return grad
    alone = tuple(sizes[f] for g in target if g not in kept for f in g)
    spec = f"{shape_text(kept)}->{shape_text(target)}"
    return b.value("stg.broadcast", [grad], {"spec": spec, "sizes": alone}, hint=hint)


class Add(OpDef):
    """The sum of any number of values. A rule such as "bsf,f->bsf" states a broadcast, as of a
    bias.

    The result is a partial sum if all operands are partial over the same axes. With `into`, the sum
    is accumulated in the buffer of the first operand, in its element type.
    """

    name = "stg.add"
    traits = (Fusible(),)
    operands = ("x*",)
    params = SPEC, _INTO, ADAPTER_STEPS
    example = "%r = stg.add(%h, %o) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        if "spec" in op.attrs:
            return make_rule(op.text("spec"), linear=range(len(op.operands)))
        return pointwise(op, linear=True)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, len(op.operands) - 1, self.rule(op))

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.flag("into") else None

    def fold(self, op: Operation) -> Value | None:
        """The sum of a single value is that value."""
        return op.operands[0] if len(op.operands) == 1 else None

    def verify(self, op: Operation) -> Iterator[str]:
        dtypes = {v.tensor.dtype for v in op.operands}
        if len(dtypes) > 1 and not op.flag("into"):
            yield f"operands have different element types: {', '.join(sorted(dtypes))}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        dy = present(grads[0])
        if "spec" not in op.attrs:
            return [dy] * len(op.operands)
        shapes, (out,) = parse_rule(op.text("spec"))
        return [
            dy
            if shape == out
            else b.value(
                "stg.sum",
                [dy],
                {"spec": f"{shape_text(out)}->{shape_text(shape)}"},
                hint=v.prefixed("d_"),
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
    """The operand with its dimensions in the places where the result has them, and size 1 in the
    others."""
    order = [shape.index(g) for g in out if g in shape]
    moved = np.transpose(array, order)
    return moved[tuple(slice(None) if g in shape else None for g in out)]


class Sum(OpDef):
    """Sum over the factors that the result does not have, such as a bias gradient "bsf->f"."""

    name = "stg.sum"
    operands = ("x",)
    params = (Param("spec", "str", SPEC.doc, required=True, positional=True),)
    flops_per_point = 1
    example = '%db = stg.sum["bsf->f"](%dy) : bf16[F]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"), linear=[0])

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        (left,), (right,) = parse_rule(op.text("spec"))
        sizes = factor_sizes(op, self.rule(op))
        attrs: dict[str, RawAttr] = {
            "spec": backwards(op),
            "sizes": tuple(sizes[f] for g in left if g not in right for f in g),
        }
        return gradients(b, op, grads, attrs, by="stg.broadcast")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.einsum(op.text("spec"), *args)]


class Broadcast(OpDef):
    """Repeats a value along new dimensions, as "f->bsf"; `sizes` has their sizes in order."""

    name = "stg.broadcast"
    traits = (Fusible(),)
    operands = ("x",)
    params = (
        Param("spec", "str", SPEC.doc, required=True, positional=True),
        Param("sizes", "sizes", "the sizes of the new dimensions", required=True),
    )
    example = '%y = stg.broadcast["f->bf", sizes = B](%x) : bf16[B, F]'

    def rule(self, op: Operation) -> Rule:
        (left,), (right,) = parse_rule(op.text("spec"))
        new = [f for g in right if g not in left for f in g]
        sizes = dict(zip(new, op.exprs("sizes"), strict=True))
        return make_rule(op.text("spec"), linear=[0], sizes=sizes)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, {"spec": backwards(op)}, by="stg.sum")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (left,), (right,) = parse_rule(op.text("spec"))
        return [np.broadcast_to(broadcast(args[0], left, right), ctx.shape(op.result))]


class Mul(Elementwise):
    """Element-wise product."""

    name = "stg.mul"
    operands = ("x", "y")
    example = "%z = stg.mul(%x, %y) : bf16[B]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        dy, (x, y) = present(grads[0]), op.operands
        pairs, sources = ((x, y), (y, x)), [_before_kernel(v) for v in (x, y)]
        made = [b.value("stg.mul", [dy, other], hint=v.prefixed("d_")) for v, other in pairs]
        if sources == [x, y]:
            return made
        # the engine casts before the node releases what it saved (`validate_outputs` of PyTorch)
        made = [cast_to(b, d, v.tensor.dtype) for d, v in zip(made, sources, strict=True)]
        b.op("stg.discard", [dy], types=())
        b.op("stg.discard", [x, y], {"saved": True}, types=())
        return made

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] * args[1]]


class Scale(Elementwise):
    """Multiplies by a fraction, which may contain symbols (a mean is a sum times 1/S), by the
    square root of `sqrt`, or by one over the square root of `rsqrt`; one FLOP per element."""

    name = "stg.scale"
    linear = True
    params = (
        Param("by", "ratio", "the factor (default 1)"),
        Param("sqrt", "size", "multiply by the square root of this"),
        Param("rsqrt", "size", "divide by the square root of this"),
        ADAPTER_STEPS,
    )
    example = "%y = stg.scale[by = 1/2](%x) : bf16[B]"

    def verify(self, op: Operation) -> Iterator[str]:
        if not {"by", "sqrt", "rsqrt"} & op.attrs.keys():
            yield "expects parameter 'by', 'sqrt' or 'rsqrt': the factor"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, by="stg.scale")

    def fold(self, op: Operation) -> Value | None:
        """`scale[by = 1](x)` is x; a scale of a scale becomes one scale by both factors."""
        if {"sqrt", "rsqrt"} & op.attrs.keys():
            return None
        inner = op.operands[0].producer
        if inner is not None and isinstance(inner.definition, Scale):
            op.attrs |= {**stated(inner, self.params), "by": _factor(op) * _factor(inner)}
            op.set_operand(0, inner.operands[0])
        return op.operands[0] if _factor(op) == 1 and op.attrs.keys() <= {"by", "phase"} else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        known = {name: const(value) for name, value in ctx.env.items()}
        scale = float(fraction(substitute(_factor(op), known)))
        for name, power in (("sqrt", 0.5), ("rsqrt", -0.5)):
            if name in op.attrs:
                scale *= ctx.size(op.expr(name)) ** power
        return [args[0] * scale]


def _factor(op: Operation) -> Expr:
    return op.expr("by", ONE)


_STAYS = (
    Param("once", "size", "the microbatches for which the copies of a parameter stay", least=1),
    Param("kept", "flag", "the copies of a parameter are there already"),
)


class Cast(Elementwise):
    """Changes the element type; no FLOPs, only bytes. Partial sums stay partial: they are reduced
    in the new type. Casts to and from i8 use one scale for the whole tensor, whose bytes are not
    counted. With `again`, the kernel that takes the result casts by itself, in backward too, so the
    result needs no memory of its own.

    A cast to 8 or 4 bits writes its result twice if products contract different dimensions of it:
    tensor cores take 8-bit operands along the contracted dimension (NVIDIA/TransformerEngine,
    `cast_transpose`), and blocks are along it. What a collective sends in 8 bits with one scale is
    written once, and copied behind the collective by a kernel of its own (`lower-to-trace`).
    Backward keeps one of the two copies, for its own product.

    With `once`, both copies of a parameter stay for this number of microbatches, each of which
    counts its part of the bytes. With `kept`, they are there, and nothing is touched.
    """

    name = "stg.cast"
    traits: ClassVar[tuple[Trait, ...]] = (Recasts(), Fusible())
    flops_per_point = 0
    linear = True
    params: ClassVar[tuple[Param, ...]] = (
        Param("to", "name", "the element type", required=True, positional=True),
        Param("again", "flag", "backward casts the value again"),
        ADAPTER_STEPS,
        *_STAYS,
    )
    example = "%y = stg.cast[f32](%x) : f32[B]"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to")]

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.flag("again") else super().reuses(op, result)

    def costs_read(self, op: Operation) -> Hashable:
        """Whether a second copy is written, for other products."""
        return casts_twice(op)

    def bytes_touched(self, op: Operation) -> Expr:
        if op.flag("kept"):
            return ZERO
        again = op.result.tensor.local_bytes if "once" in op.attrs or casts_twice(op) else ZERO
        moved = super().bytes_touched(op) + again
        return call("ceildiv", [moved, op.expr("once")]) if "once" in op.attrs else moved

    def fold(self, op: Operation) -> Value | None:
        """A cast to the type of the operand is the operand."""
        return op.operands[0]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.text("to") not in FLOATS | {"i8"}:
            yield f"casts only to floating-point types and i8, found {op.text('to')}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        to = op.operands[0].tensor.dtype
        if present(grads[0]).tensor.dtype == to:
            return grads
        return gradients(b, op, grads, {"to": to, "again": False}, by="stg.cast")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


def _before_kernel(value: Value) -> Value:
    """What a kernel takes that casts by itself; the value if it does not, or has other users."""
    op = value.producer
    casts = op is not None and isinstance(op.definition, Cast) and op.flag("again")
    casts = casts and len(value.uses) == 1
    return op.operands[0] if op is not None and casts else value


def cast_to(b: Builder, value: Value, dtype: str) -> Value:
    """The value cast to an element type; the value itself if it has that type."""
    if value.tensor.dtype == dtype:
        return value
    return b.value(Cast.name, [value], {"to": dtype}, hint=f"{value.name}_{dtype}")


class Quantize(Cast):
    """Casts to 8 bits with one scale, from the largest element, or to 8 or 4 bits with a scale per
    block; no FLOPs, only bytes.

    It is a separate kernel, since it needs the largest element, which the producer of the operand
    computes, or with `searched` a kernel before it, which reads the operand
    (NVIDIA/TransformerEngine, `nvte_compute_amax`). It reads the operand and writes the result,
    twice in the cases of `stg.cast`. Partial sums must be reduced before.

    With 4 bits, the tensor has a scale in addition to those of its blocks, so a separate kernel
    first reads the operand for its largest element. With `hadamard`, the second copy is cast from
    the operand times a random Hadamard matrix, by another kernel, which reads the operand again
    (NVIDIA/TransformerEngine, transformer_engine/common/hadamard_transform; arXiv 2509.25149,
    section 4).
    """

    name = "stg.quantize"
    traits = (Recasts(),)
    linear = False
    params = (
        Param("to", "name", "the element type", required=True, positional=True),
        Param("hadamard", "flag", "the copy for products over other dimensions is transformed"),
        Param("searched", "flag", "a kernel before it reads the operand for its largest element"),
        *_STAYS,
    )
    example = "%y = stg.quantize[f8e4m3](%x) : f8e4m3[B, S, D]"

    def bytes_touched(self, op: Operation) -> Expr:
        if op.flag("kept"):
            return ZERO
        transforms = op.flag("hadamard") and casts_twice(op)
        reads = (op.text("to") == HADAMARD) + op.flag("searched") + transforms
        more = op.operands[0].tensor.local_bytes * reads
        if "once" in op.attrs:
            more = call("ceildiv", [more, op.expr("once")])
        return super().bytes_touched(op) + more

    def verify(self, op: Operation) -> Iterator[str]:
        if op.text("to") not in QUANTIZED:
            yield f"casts only to {' or '.join(sorted(QUANTIZED))}, found {op.text('to')}"
        if op.flag("hadamard") and op.text("to") != HADAMARD:
            yield f"'hadamard' needs a cast to {HADAMARD}, found {op.text('to')}"


def casts_twice(op: Operation) -> bool:
    """Whether a cast writes a second copy, for products that contract other dimensions. With one
    scale per tensor only the first copy can be sent (NVIDIA/TransformerEngine,
    `Quantizer.supports_only_rowwise_all_gather`)."""
    to = op.text("to")
    if to not in QUANTIZED:
        return False
    sent = to in ONE_SCALE and any(isinstance(u.definition, Collective) for u, _ in op.result.uses)
    return not sent and len(set(_summed(op.result))) > 1


def _summed(value: Value) -> Iterator[tuple[int, ...]]:
    """The dimensions of a value that each product with it contracts, also if it is gathered before;
    empty for a product in another region, to which this one yields the value."""
    for user, index in value.uses:
        if isinstance(user.definition, Einsum):
            rule = user.definition.rule(user)
            gone = set(rule.contracted(0))
            yield tuple(d for d, g in enumerate(rule.operands[index]) if gone & set(g))
        elif user.has(Terminates):
            yield ()
        else:
            moved = (r for r in user.results if r.tensor.dtype in QUANTIZED)
            yield from (dims for result in moved for dims in _summed(result))
