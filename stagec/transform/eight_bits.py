"""Products of blocks with their parameters in 8-bit floats, as recipes of mixed precision do."""

from __future__ import annotations

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ZERO
from stagec.ir.module import Module, is_parameter
from stagec.ir.opdef import factor_sizes
from stagec.support.diagnostics import error
from stagec.support.source import Loc, made_by

PASS = "eight-bits"
#: Element types of forward operands, and of gradients, by recipe.
RECIPES = {"hybrid": ("f8e4m3", "f8e5m2"), "e4m3": ("f8e4m3", "f8e4m3")}


def use_eight_bits(module: Module, recipe: str, loc: Loc) -> None:
    """Cast both operands of matrix products with a parameter, inside repeats, to 8 bits; results
    keep the 16-bit type. Routers stay as they are, and so does all outside of the blocks: embedding
    and head.

    A remark says so if there is none. Raises `DiagnosticError` for blocks that compute in 32 bits.
    """
    forward, backward = RECIPES[recipe]
    cast: dict[tuple[Value, Region], Value] = {}
    found = [op for op in module.main.body.walk() if _is_layer(op)]
    for op in found:
        dtype = op.results[0].tensor.dtype
        if dtype == "f32":
            raise error(
                f"8-bit products have results of 16 bits, but %{op.results[0].name} is f32",
                loc,
                remedy="choose --param-dtype bf16, or leave fp8 out",
            )
        for index, value in enumerate(op.operands):
            key = value, _region(op)
            if key not in cast:
                b = Builder.before(module.registry, op, loc=made_by(PASS, loc))
                name = f"{value.name}_f8"
                cast[key] = b.value("stg.cast", [value], {"to": forward}, hint=name)
            op.set_operand(index, cast[key])
        op.attrs |= {"to": dtype, "grad": backward}
    if not found:
        module.diagnostics.remark("no block has a product with a parameter for 8 bits", loc)


def _region(op: Operation) -> Region:
    assert op.parent is not None
    return op.parent


def _is_layer(op: Operation) -> bool:
    """Whether it is a matrix product of an activation with a parameter of a block."""
    around = op.parent_op
    if op.name != "stg.einsum" or around is None or not around.definition.carries:
        return False
    if sum(map(is_parameter, op.operands)) != 1 or _chooses(op):
        return False
    rule = op.definition.rule(op)
    assert rule is not None
    return op.definition.matmul_flops(op, factor_sizes(op, rule)) != ZERO


def _chooses(op: Operation) -> bool:
    """Whether its result are the scores of a router."""
    return any(user.name == "stg.route" for user, _ in op.results[0].uses)
