"""Element types of gradients, optimizer state and products."""

from collections.abc import Iterator
from typing import Any

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

DTYPES = ("f32", "bf16", "f16")
#: The element type of the parameter that a gradient or moment belongs to.
PARAM = "param"
#: The element type in which parameters are gathered and used.
COMPUTE = "compute"


#: Recipes with a scale per block, which is computed from the block.
BLOCKS = ("block", "mxfp8", "nvfp4")
FP8 = ("hybrid", "e4m3", *BLOCKS)


SCALING = ("delayed", "current")
WEIGHTS = ("each", "once", "stored")


def _dtype(
    name: str,
    default: str,
    help: str,
    *others: str,
    tries: tuple[str, ...] = ("f32", "bf16"),
    only: tuple[str, int] | None = None,
) -> Any:
    return flagged(
        f"{name}_dtype",
        help,
        doc=f"element type: {name}",
        default=default,
        choices=(*DTYPES, *others),
        tries=tries,
        only=only,
        numerics=True,
        rare=True,
    )


class DtypesRule(Record):
    """Element types of parameters and activations, gradients, reductions on the wire, the master
    copy and the moments; `fp8` is the recipe of 8-bit products, if there are any."""

    param: str = _dtype("param", "bf16", "Element type of parameters and activations.")
    grad: str = _dtype(
        "grad", "f32", "Element type of gradients; param: that of their parameter.", PARAM
    )
    reduce: str = _dtype(
        "reduce", "f32", "Element type in which gradients are reduced.", PARAM, COMPUTE
    )
    master: str = _dtype(
        "master",
        "f32",
        "Element type of the optimizer's copy of the parameters; none: no copy.",
        "none",
    )
    compute: str = _dtype(
        "compute",
        PARAM,
        "Element type in which ZeRO-3 gathers parameters and computes; each gather casts (param: "
        "that of the parameters).",
        PARAM,
        tries=(),
        only=("zero", 3),
    )
    moment: str = _dtype(
        "moment", "f32", "Element type of the optimizer's moments.", PARAM, tries=()
    )
    fp8: str = parameter(
        "name",
        "recipe of products of 8 or 4 bits",
        default="",
        choices=FP8,
        flag=Flag(
            "fp8",
            "8- or 4-bit operands of the blocks' products: e4m3 forward, gradients in e5m2 "
            "(hybrid) or e4m3; e4m3 with a scale for each 128 elements (block) or 32 (mxfp8); "
            "e2m1 with a scale for each 16 (nvfp4).",
            default="none",
            tries=("none", "hybrid"),
            numerics=True,
        ),
    )
    scaling: str = flagged(
        "fp8_scaling",
        "Scales of --fp8 are known before (delayed: surrounding kernels cast) or computed from the "
        "operand (current: casts are kernels).",
        doc="where the scales of 8-bit operands come from",
        choices=SCALING,
        needs=("fp8",),
        numerics=True,
        rare=True,
    )
    weights: str = flagged(
        "fp8_weights",
        "Casts of parameters by --fp8: in forward and backward of each microbatch (each), in the "
        "first one of a step, whose copies stay (once), or in the update (stored).",
        doc="when parameters are cast to 8 or 4 bits",
        choices=WEIGHTS,
        beside=("fp8",),
        tries=(),
        rare=True,
    )


def of_parameter(said: str, param: str) -> str:
    """The element type of a gradient or moment that the text states as `said`, for a parameter of
    type `param`."""
    return param if said == PARAM else said


def computed_in(dtypes: DtypesRule, zero: int, param: str) -> str:
    """The element type in which computations use parameters of type `param` at a stage of ZeRO."""
    return of_parameter(dtypes.compute, param) if zero >= 3 else param


def on_the_wire(dtypes: DtypesRule, zero: int, param: str) -> str:
    """The element type in which gradients of parameters of type `param` are reduced."""
    if dtypes.reduce == COMPUTE:
        return computed_in(dtypes, zero, param)
    return of_parameter(dtypes.reduce, param)


class DtypesOp(Statement):
    """The element types of parameters and activations, gradients, reductions on the wire, the
    master copy and moments.

    Gradients, reductions and moments with `param` have the type of their parameter, as in
    `torch.optim`; reductions with `compute` have the type `compute`. With `master = none`, the
    optimizer updates the parameter itself.

    With `compute`, parameters that ZeRO-3 shards have the type `param` at rest and in the
    optimizer, and are gathered and used in the type `compute`, as with
    `MixedPrecisionPolicy(param_dtype)` of PyTorch's `fully_shard`; activations, and gradients
    before their reduction, have that type too. Without parameters that ZeRO-3 shards, it has no
    effect.

    With `fp8`, both operands of the products with parameters in blocks are 8-bit floats: f8e4m3 in
    forward; in backward, incoming gradients are f8e5m2 (`hybrid`) or f8e4m3 (`e4m3`). With `block`,
    activations and gradients are f8e4m3s, which has an f32 scale for each 128 elements, as in
    DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and block scaling of Transformer Engine. Results,
    and parameters at rest, keep their type. With `scaling = current`, the scale is computed from
    the tensor that is cast, so the cast needs the whole tensor and is a separate kernel:
    `stg.quantize`.

    With `weights = once`, parameters are cast in the first microbatch, for forward and backward of
    all, as in Megatron-Core (core/extensions/transformer_engine.py: `TELinear.forward`,
    `is_first_microbatch`). Each microbatch counts its part of the bytes; those of the copies do not
    count in memory. Parameters that ZeRO-3 gathers are cast each time, with `stored` never: they
    are in 8 bits at rest (`fp8_param_gather`), which does not count in memory or in gathers either.
    Others are cast with `stored` as with `once`.

    `mxfp8` and `nvfp4` are recipes of Blackwell, whose casts are separate kernels too, as in
    Transformer Engine (`MXFP8BlockScaling`, `NVFP4BlockScaling`). With `mxfp8`, activations,
    parameters and gradients are f8e4m3s, with the size of an 8-bit scale for each 32 elements. With
    `nvfp4` they are f4e2m1s, with an 8-bit scale for each 16 elements, in all three products of
    forward and backward; the copies of activations and gradients for the gradients of parameters go
    through a random Hadamard transform.
    """

    name, record = "stg.dtypes", DtypesRule
    section = Section.KERNELS
    example = "stg.dtypes[param = bf16, grad = f32, reduce = f32, master = f32]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if op.attrs.get("fp8") in BLOCKS and op.attrs.get("scaling") == "current":
            yield "expects no 'scaling' with this 'fp8', whose scales are computed for each block"
        if "scaling" in op.attrs and "fp8" not in op.attrs:
            yield "expects 'fp8' beside 'scaling', which is for products of 8 bits"

    def from_flags(self, request: FlagValues) -> Statements:
        types = {n: request[f"{n}_dtype"] for n in ("param", "grad", "reduce", "master")}
        if request["autocast"] and not request.is_stated("param_dtype"):
            types["param"] = "f32"  # which autocast casts
        yield {**types, **self.flag_values(request)}
