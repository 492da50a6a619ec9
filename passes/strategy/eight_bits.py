"""Products of blocks with their parameters in 8-bit floats, as recipes of mixed precision do."""

from __future__ import annotations

from stagec.api import (
    Builder,
    Loc,
    Module,
    Operation,
    Region,
    Value,
    error,
    factor_sizes,
    is_parameter,
    made_by,
)
from stagec.ir.expr import ZERO
from stagec.ir.traits import Chooses, Repeats

PASS = "eight-bits"
#: Element types of forward operands, and of gradients, by recipe.
RECIPES = {"hybrid": ("f8e4m3", "f8e5m2"), "e4m3": ("f8e4m3", "f8e4m3")}


def use_eight_bits(module: Module, recipe: str, loc: Loc) -> None:
    """Cast both operands of matrix products with a parameter, inside repeats, to 8 bits; results
    keep the 16-bit type. Routers stay as they are, and so does all outside of the blocks: embedding
    and head.

    A remark says so if there is none. Raises `DiagnosticError` for blocks that compute in 32 bits.
    """
    blocks = [op.body for op in module.main.body.walk() if op.has(Repeats)]
    if not sum(_cast_operands(module, block, recipe, loc) for block in blocks):
        module.diagnostics.remark("no block has a product with a parameter for 8 bits", loc)


def _cast_operands(module: Module, block: Region, recipe: str, loc: Loc) -> int:
    """The number of products whose operands are now of 8 bits; each value is cast once."""
    forward, backward = RECIPES[recipe]
    cast: dict[Value, Value] = {}
    found = [op for op in block.ops if _is_layer(op)]
    for op in found:
        dtype = op.result.tensor.dtype
        if dtype == "f32":
            raise error(
                f"8-bit products have results of 16 bits, but %{op.result.name} is f32",
                loc,
                remedy="choose --param-dtype bf16, or leave fp8 out",
            )
        for index, value in enumerate(op.operands):
            if value not in cast:
                b = Builder.before(module.registry, op, loc=made_by(PASS, loc))
                attrs = {"to": forward}
                cast[value] = b.value("stg.cast", [value], attrs, hint=f"{value.name}_f8")
            op.set_operand(index, cast[value])
        op.attrs |= {"to": dtype, "grad": backward}
    return len(found)


def _is_layer(op: Operation) -> bool:
    """Whether it multiplies an activation with a parameter, in any element type, and no choice
    depends on the result."""
    if not op.definition.params_by_name.keys() >= {"to", "grad"}:
        return False
    if sum(map(is_parameter, op.operands)) != 1:
        return False
    if any(user.has(Chooses) for user, _ in op.result.uses):
        return False
    rule = op.definition.rule(op)
    return rule is not None and op.definition.matmul_flops(op, factor_sizes(op, rule)) != ZERO
