"""Sends the narrower type: a cast that follows the move of a value comes before it."""

from __future__ import annotations

from dataclasses import replace

from stagec.ir.builder import Builder
from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.ir.types import DTYPE_BYTES

_MOVES = ("stg.all_gather", "stg.all_to_all")


def cast_before_moves(module: Module) -> None:
    """Exchange moves with casts to fewer bytes that are all that becomes of them.

    Moves only copy elements, so results are the same.
    """
    for op in list(module.main.body.walk()):
        if op.name in _MOVES and (cast := _narrowing(op)) is not None:
            _exchange(module, op, cast)


def _narrowing(move: Operation) -> Operation | None:
    """The cast to fewer bytes that uses a moved value alone."""
    (result,) = move.results
    if len(result.uses) != 1:
        return None
    user = result.uses[0][0]
    if user.name != "stg.cast" or user.parent is not move.parent:
        return None
    return user if DTYPE_BYTES[user.text("to")] < DTYPE_BYTES[result.tensor.dtype] else None


def _exchange(module: Module, move: Operation, cast: Operation) -> None:
    (source,), (moved,), (result,) = move.operands, move.results, cast.results
    dtype = cast.text("to")
    b = Builder.before(module.registry, move, loc=cast.loc, phase=cast.phase)
    type_ = replace(source.tensor, dtype=dtype, role="")
    move.set_operand(0, b.value("stg.cast", [source], {"to": dtype}, type=type_, hint=result.name))
    moved.type = replace(moved.tensor, dtype=dtype)
    result.replace_with(moved)
    cast.erase()
