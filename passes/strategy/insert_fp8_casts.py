"""insert-fp8-casts: casts operands of products with parameters in blocks to floats of 8 or 4
bits."""

from typing import NamedTuple

from stagec.api import (
    Loc,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Value,
    error,
    factor_sizes,
    is_parameter,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ZERO
from stagec.ir.module import uncast
from stagec.ir.rewrite import is_chosen_by
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.contraction import HADAMARD
from stagec.ir_spec.strategy.fusion import FusionRule


class Recipe(NamedTuple):
    """The element types of activations, parameters and gradients in products. A scale per tensor,
    or per 128 x 128 elements of a parameter, is not part of a type: it takes less than a byte per
    4,000 elements. `quantizes` states that casts are kernels of their own."""

    activations: str
    parameters: str
    gradients: str
    quantizes: bool = False


RECIPES = {
    "hybrid": Recipe("f8e4m3", "f8e4m3", "f8e5m2"),
    "e4m3": Recipe("f8e4m3", "f8e4m3", "f8e4m3"),
    "block": Recipe("f8e4m3s", "f8e4m3", "f8e4m3s"),
    "mxfp8": Recipe("f8e4m3s", "f8e4m3s", "f8e4m3s", quantizes=True),
    "nvfp4": Recipe("f4e2m1s", "f4e2m1s", "f4e2m1s", quantizes=True),
}


class InsertFp8Casts(Pass):
    """Cast both operands of matrix products with a parameter, in repeats, to floats of 8 or 4 bits.

    `stg.dtypes[fp8 = ...]` asks for it. A 32-bit parameter that is cast where it is used counts as
    well: its cast is cast again. With `block` activations and gradients have one scale per 128
    elements, which is moved and stored with them. Results keep their 16-bit type. Products of
    routers are not changed, nor are 32-bit products beside others, such as those of adapters.
    Embedding and head are outside of repeats and not changed either. With `scaling = current`,
    `mxfp8` and `nvfp4`, casts are `stg.quantize`, also those of gradients. With `nvfp4` the
    operands of weight gradients are multiplied by a random Hadamard matrix first (`hadamard`).
    With `weights = once`, casts of parameters that ZeRO-3 does not gather state for how many
    microbatches their copies stay (`once`); with `stored`, others state that their copies are there
    (`kept`). With `scaling = current` and `stg.fusion[none]` no other kernel looks for the largest
    element (`searched`).

    Before:
        stg.strategy @s {
          stg.dtypes[fp8 = hybrid]
        }
        stg.func @f(%x: bf16[B, D], %W: bf16[L, D, D | param]) {
          %y = stg.repeat[count = L] (%h: bf16[B, D] = %x, %w: bf16[D, D] = %W) {
            %u = stg.einsum["bd,de->be"](%h, %w) : bf16[B, D]
            stg.yield(%u)
          } : bf16[B, D]
          stg.return(%y)
        }
    After:
        stg.strategy @s {
          stg.dtypes[fp8 = hybrid]
        }
        stg.func @f(%x: bf16[B, D], %W: bf16[L, D, D | param]) {
          %y = stg.repeat[count = L] (%h: bf16[B, D] = %x, %w: bf16[D, D] = %W) {
            %h_f8 = stg.cast[f8e4m3](%h) : f8e4m3[B, D]
            %w_f8 = stg.cast[f8e4m3](%w) : f8e4m3[D, D]
            %u = stg.einsum["bd,de->be", to = bf16, grad = f8e5m2](%h_f8, %w_f8) : bf16[B, D]
            stg.yield(%u)
          } : bf16[B, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).dtypes.fp8)

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        dtypes = strategy.dtypes
        quantize = RECIPES[dtypes.fp8].quantizes or dtypes.scaling == "current"
        once = strategy.microbatches if strategy.zero < 3 and dtypes.weights != "each" else 0
        kept = strategy.zero == 3 and dtypes.weights == "stored"
        searched = dtypes.scaling == "current" and strategy.one(FusionRule).kind == "none"
        how = Casts(quantize=quantize, searched=searched, once=once, kept=kept)
        insert_fp8_casts(module, dtypes.fp8, dtypes.loc, how)


class Casts(NamedTuple):
    """How operands are cast: whether by `stg.quantize`, and then whether a kernel before it looks
    for the largest element; parameters once for `once` microbatches (0: each time). With `kept`,
    those that are gathered are in 8 bits already and not cast."""

    quantize: bool = False
    searched: bool = False
    once: int = 0
    kept: bool = False


def insert_fp8_casts(module: Module, recipe: str, loc: Loc, how: Casts) -> None:
    """Cast the operands of the affected products, in place; a remark reports that there are none.

    Raises `DiagnosticError` for blocks that compute in 32 bits.
    """
    blocks = [op.body for op in module.main.body.walk() if op.has(Repeats)]
    if not sum(_cast_operands(module, block, recipe, loc, how) for block in blocks):
        remark = "no block has a product with a parameter, so nothing is cast"
        module.diagnostics.remark(remark, loc)


def _cast_operands(module: Module, block: Region, recipe: str, loc: Loc, how: Casts) -> int:
    """Cast the operands of the products of a block, each value once. Returns their number. Raises
    `DiagnosticError` for blocks that compute in 32 bits."""
    types = RECIPES[recipe]
    name = "stg.quantize" if how.quantize else "stg.cast"
    searched: dict[str, bool] = {"searched": True} if how.searched else {}
    cast: dict[Value, Value] = {}
    every = [op for op in block.ops if _is_linear(op)]
    linear = [op for op in every if op.result.tensor.dtype != "f32"]
    if every and not linear:
        raise error(
            f"products of {recipe} have results of 16 bits, but %{every[0].result.name} is f32",
            loc,
            remedy="choose --param-dtype bf16 or --autocast, or leave fp8 out",
        )
    for op in linear:
        dtype = op.result.tensor.dtype
        for index, value in enumerate(op.operands):
            if value not in cast:
                b = module.before(op, loc=loc, by=InsertFp8Casts.name)
                weight = is_parameter(uncast(value))
                to = types.parameters if weight else types.activations
                attrs: dict[str, RawAttr] = {"to": to, **searched}
                if how.quantize and to == HADAMARD and not weight:
                    attrs["hadamard"] = True
                if weight and how.once:
                    attrs["once"] = how.once
                elif weight and how.kept:
                    attrs["kept"] = True
                cast[value] = b.value(name, [value], attrs, hint=f"{value.name}_{to[:2]}")
            op.set_operand(index, cast[value])
        op.attrs |= {"to": dtype, "grad": types.gradients}
        op.attrs |= {"quantize": True, **searched} if how.quantize else {}
    return len(linear)


def _is_linear(op: Operation) -> bool:
    """Whether an op multiplies an activation by a parameter and is not a router."""
    if not op.definition.params_by_name.keys() >= {"to", "grad"}:
        return False
    if sum(is_parameter(uncast(value)) for value in op.operands) != 1:
        return False
    if is_chosen_by(op.result):
        return False
    rule = op.definition.rule(op)
    return rule is not None and op.definition.matmul_flops(op, factor_sizes(op, rule)) != ZERO
