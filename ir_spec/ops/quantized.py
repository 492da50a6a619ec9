"""Products with quantized weights (8 bits or fewer), and the formats of these weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr, const, total
from stagec.ir.kernel import KernelShape, matrix_product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.routed import expert_weights
from stagec.ir.rule import Rule, Shape, make_rule, parse_rule, shape_text
from stagec.ir.types import EIGHT_BITS, FLOATS
from stagec.ir_spec.ops.base import SPEC, present

#: The parts of a model whose weights a checkpoint may quantize: all blocks, all but attention,
#: these and the last product of attention, or the routed experts alone.
ALL, FEED_FORWARD, OUTPUTS, ROUTED = PARTS = ("all", "feed_forward", "outputs", "experts")


@dataclass(frozen=True)
class WeightFormat:
    """How a quantized weight is stored: its elements, and what a block of them shares.

    A block has `rows` elements along a contracted dimension (None: all of them) and `columns` along
    another one. `scale` is the element type of its scale, `zero` that of its zero point (empty: no
    zero point).

    On devices whose units multiply `units`, activations are cast to `compute` before a product. If
    `compute` is empty, activations keep their type, and the weight is converted to it inside the
    kernel. With `decoded`, a kernel before it converts the weight, and activations in f32 are cast
    to that type and the result back. With a `table`, elements are indices into `TABLES[table]`. In
    checkpoints of models with experts, the weights of `parts` have the format.
    """

    dtype: str
    rows: int | None
    columns: int
    scale: str
    zero: str = ""
    compute: str = ""
    units: str = ""
    decoded: str = ""
    table: str = ""
    parts: str = ALL


#: The formats by name; docs/serving.md gives the bytes of each. Sources: `fp8`, DeepGEMM and
#: arXiv 2412.19437, section 3.3.2; `int8`, one scale for each output channel (arXiv 2208.07339);
#: `int4`, AWQ with groups of 128 (arXiv 2306.00978); `mxfp4`, OCP Microscaling 1.0; `nvfp4`,
#: groups of 16 with f8e4m3 scales; `nf4`, groups of 64 with scales of 8 bits (arXiv 2305.14314),
#: which bitsandbytes.functional.dequantize_4bit converts, with products in bf16 (QLoRA:
#: bnb_4bit_compute_dtype; bitsandbytes.nn.Linear4bit.forward casts input and output). `parts`:
#: config.json and hf_quant_config.json (modules_to_not_convert, exclude_modules, ignore) of
#: openai/gpt-oss-120b, nvidia/Kimi-K2.5-NVFP4, GLM-5-NVFP4, MiniMax-M2.5-NVFP4 and
#: moonshotai/Kimi-K2.5.
#: docs/decisions/low-precision.md#125 says what engines do with the others.
FORMATS: Mapping[str, WeightFormat] = {
    "fp8": WeightFormat("f8e4m3", 128, 128, "f32", compute="f8e4m3s", units="f8e4m3"),
    "int8": WeightFormat("i8", None, 1, "bf16"),
    "int4": WeightFormat("i4", 128, 1, "bf16", zero="i4", parts=ROUTED),
    "mxfp4": WeightFormat(
        "f4e2m1", 32, 1, "u8", compute="f8e4m3s", units="f4e2m1", parts=FEED_FORWARD
    ),
    "nvfp4": WeightFormat(
        "f4e2m1", 16, 1, "f8e4m3", compute="f4e2m1s", units="f4e2m1", parts=FEED_FORWARD
    ),
    "nf4": WeightFormat("i4", 64, 1, "u8", decoded="bf16", table="nf4"),
}


#: The element types that `stg.weights[activations = ...]` casts activations to, for any format;
#: empty: they keep their type.
ACTIVATIONS: Mapping[str, str] = {"bf16": "", "fp8": "f8e4m3s", "fp4": "f4e2m1s", "int8": "i8"}


#: The values that elements are indices of (arXiv 2305.14314, appendix E).
TABLES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
}


class ScaledEinsum(OpDef):
    """A contraction with a quantized weight whose blocks have scales: x times (w - zero) * scale.

    The index rule states the blocks: in "bs(dw),(dw)f,df->bsf", w elements along d share a scale.
    A block is never split, so its scale is on the same rank. The kernel reads the weight as it is
    stored. With the flag `decoded`, a kernel before it converts the weight to the type of x, which
    is the second result. With a `table`, the elements of the weight are indices into it. The weight
    has no gradient.

    FLOPs are those of the product; the conversion of the weight is not counted. `lower-to-trace`
    makes it a node of its own.
    """

    name = "stg.scaled_einsum"
    operands = ("x", "w", "scales*")
    results = ("result", "decoded?")
    params = (
        Param("spec", "str", SPEC.doc, required=True, positional=True),
        Param("to", "name", "the element type of the result, if not that of x"),
        Param("decoded", "flag", "a separate kernel converts the weight to the type of x"),
        Param("table", "name", "the values that elements are indices of", choices=tuple(TABLES)),
    )
    flops_per_point = 2
    example = '%y = stg.scaled_einsum["bs(dw),(dw)f,df->bsf"](%x, %w_int4, %scales) : bf16[B, S, F]'

    def rule(self, op: Operation) -> Rule:
        """The rule of `spec`, in which the factors inside a block are never split."""
        (_, weight, *scales), _ = parse_rule(op.text("spec"))
        outside = {f for shape in scales for group in shape for f in group}
        inside = {f for g in weight if len(g) > 1 for f in g if f not in outside}
        second = f",{shape_text(weight)}" if op.flag("decoded") else ""
        return make_rule(op.text("spec") + second, whole="".join(sorted(inside)), each=[0])

    def verify(self, op: Operation) -> Iterator[str]:
        shapes, results = parse_rule(op.text("spec"))
        if not 3 <= len(shapes) <= 4 or len(results) != 1:
            yield "expects the rule of a product with scales and, if they are operands, zero points"
            return
        weight = {f for group in shapes[1] for f in group}
        for shape in shapes[2:]:
            if unknown := sorted({f for group in shape for f in group} - weight):
                yield f"factor '{unknown[0]}' of the scales is not a factor of the weight"
        for dtype, allowed in (
            (op.operands[0].tensor.dtype, FLOATS | {"i8"}),
            (op.text("to", "f32"), FLOATS),
        ):
            if dtype not in allowed:
                yield f"expects a floating-point type, found {dtype}"

    def dtypes(self, op: Operation) -> Sequence[str]:
        x = op.operands[0].tensor.dtype
        return [op.text("to", x), *([x] if op.flag("decoded") else [])]

    def bytes_touched(self, op: Operation) -> Expr:
        """A decoded weight is written once and read once."""
        return super().bytes_touched(op) + total(v.tensor.local_bytes for v in op.results[1:])

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return (
            const(len(TABLES[op.text("table")])) if operand == 1 and "table" in op.attrs else None
        )

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        (x, weight, *scales), (out,) = parse_rule(op.text("spec"))
        operands, dtype = [present(grads[0]), *op.operands[1:]], op.operands[0].tensor.dtype
        to = dtype if dtype not in EIGHT_BITS else operands[0].tensor.dtype
        left = ",".join(shape_text(s) for s in (out, weight, *scales))
        attrs: dict[str, RawAttr] = {**op.attrs, "spec": f"{left}->{shape_text(x)}", "to": to}
        attrs.pop("phase", None)
        names = [op.operands[0].prefixed("d_"), op.operands[1].prefixed("decoded_")]
        product = b.op("stg.scaled_einsum", operands, attrs, names=names)
        return [product.results[0], *(None for _ in op.operands[1:])]

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n) if self.rule(op).contracted(0) else ZERO

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        rule = self.rule(op)
        product = replace(rule, operands=rule.operands[:2], results=rule.results[:1])
        weights = expert_weights(op, rule)
        sizes = n if weights is None else weights.occupied(n)
        return matrix_product(product, sizes, op.operands[0].tensor.dtype)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        shapes, (out,) = parse_rule(op.text("spec"))
        sizes = _sizes(shapes, args)
        if "table" in op.attrs:
            args = (
                args[0],
                np.array(TABLES[op.text("table")])[np.asarray(args[1], int)],
                *args[2:],
            )
        x, w, *scales = (_by_factor(a, s, sizes) for a, s in zip(args, shapes, strict=True))
        scale, *zero = (_letters(shape) for shape in shapes[2:])
        left, right, result = _letters(shapes[0]), _letters(shapes[1]), _letters(out)
        if zero:
            ones = np.ones_like(w)
            w = w - np.einsum(f"{right},{zero[0]}->{right}", ones, scales[1])
        text = f"{left},{right},{scale}->{result}"
        product = np.einsum(text, x, w, scales[0], optimize=True)
        product = product.reshape([int(np.prod([sizes[f] for f in g], dtype=int)) for g in out])
        return [product, args[1]][: len(op.results)]


def _letters(shape: Shape) -> str:
    return "".join(f for group in shape for f in group)


def _sizes(shapes: Sequence[Shape], arrays: Sequence[Array]) -> dict[str, int]:
    """The size of each factor. That of a factor inside a block is the size of its dimension over
    the sizes of the other factors there."""
    dims = [
        (g, n) for s, a in zip(shapes, arrays, strict=True) for g, n in zip(s, a.shape, strict=True)
    ]
    sizes = {g[0]: n for g, n in dims if len(g) == 1}
    for group, size in dims:
        known = [sizes[f] for f in group if f in sizes]
        for f in group:
            if f not in sizes:
                sizes[f] = size // int(np.prod(known, dtype=int))
    return sizes


def _by_factor(array: Array, shape: Shape, sizes: Mapping[str, int]) -> Array:
    """The array with one dimension for each factor of `shape`."""
    return np.reshape(array, [sizes[f] for group in shape for f in group])
