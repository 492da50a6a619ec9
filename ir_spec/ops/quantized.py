"""Products with weights of few bits, and the formats of these weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Expr
from stagec.ir.kernel import KernelShape, matrix_product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.routed import expert_weights
from stagec.ir.rule import Rule, Shape, make_rule, parse_rule
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.base import SPEC, work
from stagec.ir_spec.ops.statement import Flag, FlagValues, Record, Section, Statement, parameter


@dataclass(frozen=True)
class WeightFormat:
    """How a weight of few bits is stored: elements, and what a block of them shares.

    A block has `rows` elements along a contracted dimension (None: all of them) and `columns` along
    another one. `scale` is the element type of its scale, `zero` that of its zero point, if it has
    one. Products take activations in `compute`, to which they are cast, on devices whose units
    multiply `units`; empty: activations as they are, and the kernel turns weights into their type.
    """

    dtype: str
    rows: int | None
    columns: int
    scale: str
    zero: str = ""
    compute: str = ""
    units: str = ""


#: The formats by their names; docs/serving.md has the bytes of each. Sources: `fp8`, DeepGEMM and
#: arXiv 2412.19437, section 3.3.2; `int8`, one scale for each output channel (arXiv 2208.07339);
#: `int4`, AWQ with groups of 128 (arXiv 2306.00978); `mxfp4`, OCP Microscaling 1.0; `nvfp4`,
#: groups of 16 with f8e4m3 scales. docs/decisions/125-what-activations-are-multiplied-in.md says
#: what engines do with each.
FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp8": WeightFormat("f8e4m3", 128, 128, "f32", compute="f8e4m3s", units="f8e4m3"),
        "int8": WeightFormat("i8", None, 1, "bf16"),
        "int4": WeightFormat("i4", 128, 1, "bf16", zero="i4"),
        "mxfp4": WeightFormat("f4e2m1", 32, 1, "u8", compute="f8e4m3s", units="f4e2m1"),
        "nvfp4": WeightFormat("f4e2m1", 16, 1, "f8e4m3", compute="f4e2m1s", units="f4e2m1"),
    }
)


#: What activations may be cast to, whatever the format: `stg.weights[activations = ...]`.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"bf16": "", "fp8": "f8e4m3s", "fp4": "f4e2m1s", "int8": "i8"}
)


class ScaledEinsum(OpDef):
    """A contraction with a weight of few bits whose blocks have scales: x times (w - zero) * scale.

    The index rule states the blocks: in "bs(dw),(dw)f,df->bsf" w elements along d share a scale.
    What a block shares lies on the rank that has the block, so its inside is never split. The
    kernel reads the weight as it is stored.

    FLOPs are those of the product; turning the weight into the type of x inside the kernel is not
    counted.
    """

    name = "stg.scaled_einsum"
    operands = ("x", "w", "scales*")
    params = (
        Param("spec", "str", SPEC.doc, required=True, positional=True),
        Param("to", "name", "the element type of the result, if not that of x"),
    )
    example = '%y = stg.scaled_einsum["bs(dw),(dw)f,df->bsf"](%x, %w_int4, %scales) : bf16[B, S, F]'

    def rule(self, op: Operation) -> Rule:
        """Along the inside of a block nothing is split."""
        (_, weight, *scales), _ = parse_rule(op.text("spec"))
        outside = {f for shape in scales for group in shape for f in group}
        inside = {f for g in weight if len(g) > 1 for f in g if f not in outside}
        return make_rule(op.text("spec"), whole="".join(sorted(inside)), each=[0])

    def verify(self, op: Operation) -> Iterator[str]:
        shapes, results = parse_rule(op.text("spec"))
        if not 3 <= len(shapes) <= 4 or len(results) != 1:
            yield "expects the rule of a product with scales, and zero points where there are any"
            return
        have = {f for group in shapes[1] for f in group}
        for shape in shapes[2:]:
            if lost := sorted({f for group in shape for f in group} - have):
                yield f"factor '{lost[0]}' of the scales is not one of the weight"
        for dtype, known in (
            (op.operands[0].tensor.dtype, FLOATS | {"i8"}),
            (op.text("to", "f32"), FLOATS),
        ):
            if dtype not in known:
                yield f"expects a floating-point type, found {dtype}"

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("to", op.operands[0].tensor.dtype)]

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return work(n, 2, self.rule(op))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n) if self.rule(op).contracted(0) else ZERO

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        rule = self.rule(op)
        product, weights = replace(rule, operands=rule.operands[:2]), expert_weights(op, rule)
        sizes = n if weights is None else weights.occupied(n)
        return matrix_product(product, sizes, op.operands[0].tensor.dtype)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        shapes, (out,) = parse_rule(op.text("spec"))
        sizes = _sizes(shapes, args)
        x, w, *scales = (_apart(a, s, sizes) for a, s in zip(args, shapes, strict=True))
        scale, *zero = (_letters(shape) for shape in shapes[2:])
        left, right, result = _letters(shapes[0]), _letters(shapes[1]), _letters(out)
        if zero:
            ones = np.ones_like(w)
            w = w - np.einsum(f"{right},{zero[0]}->{right}", ones, scales[1])
        text = f"{left},{right},{scale}->{result}"
        found = np.einsum(text, x, w, scales[0], optimize=True)
        return [found.reshape([int(np.prod([sizes[f] for f in g], dtype=int)) for g in out])]


def _letters(shape: Shape) -> str:
    return "".join(f for group in shape for f in group)


def _sizes(shapes: Sequence[Shape], arrays: Sequence[Array]) -> dict[str, int]:
    """The size of each factor; that of one inside of a block from those around."""
    dims = [
        (g, n) for s, a in zip(shapes, arrays, strict=True) for g, n in zip(s, a.shape, strict=True)
    ]
    found = {g[0]: n for g, n in dims if len(g) == 1}
    for group, size in dims:
        known = [found[f] for f in group if f in found]
        for f in group:
            if f not in found:
                found[f] = size // int(np.prod(known, dtype=int))
    return found


def _apart(array: Array, shape: Shape, sizes: Mapping[str, int]) -> Array:
    """With a dimension for each factor."""
    return np.reshape(array, [sizes[f] for group in shape for f in group])


# -- what a strategy says --------------------------------------------------------------------------


#: Activations are in what the format has them in.
AUTO = "auto"


@dataclass(frozen=True)
class WeightsRule(Record):
    """The format of the weights of the blocks."""

    format: str = parameter(
        "name",
        "bf16 (as they are), fp8, int8, int4, mxfp4 or nvfp4",
        default="bf16",
        positional=True,
        choices=("bf16", *FORMATS),
        flag=Flag(
            "weight_dtype",
            "How the weights of the blocks are stored while serving.",
            numerics=True,
        ),
    )
    activations: str = parameter(
        "name",
        "what products take activations in: auto (as the format has it), bf16 (as they are), fp8, "
        "fp4 or int8",
        default=AUTO,
        choices=(AUTO, *ACTIVATIONS),
        flag=Flag(
            "activation_dtype",
            "What products take activations in (auto: fp8 with fp8 and mxfp4 weights, fp4 with "
            "nvfp4, else, or where the machine has no units for that, as they are).",
            needs=("weight_dtype",),
            numerics=True,
        ),
    )
    block: int = parameter(
        "int",
        "elements of a block along a dimension (0: as the format has them)",
        least=0,
        flag=Flag(
            "weight_block",
            "Elements of a block of weights along a dimension (default: as the format has them).",
            metavar="N",
            needs=("weight_dtype",),
            numerics=True,
        ),
    )


class WeightsOp(Statement):
    """The weights of the blocks are stored in few bits, with scales for blocks of elements. Bytes
    of a weight of n elements, its matrix being rows (contracted) by columns:

    | format  | elements | a block has | it shares                | bytes          |
    |---------|----------|-------------|--------------------------|----------------|
    | `fp8`   | f8e4m3   | 128 x 128   | an f32 scale             | n + 4n/16384   |
    | `int8`  | 8 bits   | a column    | a bf16 scale             | n + 2n/rows    |
    | `int4`  | 4 bits   | 128 rows    | bf16 scale, 4-bit zero   | n/2 + 2.5n/128 |
    | `mxfp4` | f4e2m1   | 32 rows     | a scale of 8 bits        | n/2 + n/32     |
    | `nvfp4` | f4e2m1   | 16 rows     | an f8e4m3 scale          | n/2 + n/16     |

    Unless `activations` says otherwise, products take them in f8e4m3s with `fp8` and `mxfp4` (an
    f32 scale for each 128 elements, as DeepGEMM, or one of 8 bits for each 32: as many bytes), in
    f4e2m1s with `nvfp4` (a scale of 8 bits for each 16), else as they are: the kernel turns
    weights into their type (W4A16, W8A16). The one f32 that nvfp4 has for a tensor is not counted,
    nor those of rows in int8.
    """

    name, record = "stg.weights", WeightsRule
    section = Section.SERVING
    example = "stg.weights[int4]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if request["weight_dtype"] != "bf16":
            yield self.flag_values(request)


OPS = (ScaledEinsum(), WeightsOp())
