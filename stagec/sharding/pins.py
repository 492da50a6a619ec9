"""Pinned results: where a value shall be, not how its op computes it.

While placements are found, a pin is a `stg.sharding_constraint` behind the op, which then may be
placed otherwise if less moves so:

    %y = stg.softmax(%x) : f32[A, B@x]      before
    %y = stg.softmax(%x) : f32[A, B]        while placements are found
    %y_placed = stg.sharding_constraint(%y) : f32[A, B@x]

A place behind an op that gives its result as pinned is taken away again.
"""

from __future__ import annotations

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.ir_spec.ops.layout import Identity
from stagec.sharding.assignment import MAKE_PARTS
from stagec.support.diagnostics import error


def part_pins(module: Module, region: Region) -> list[Operation]:
    """Take the pins off the results of ops with rules; the places that have them now."""
    made: list[Operation] = []
    for op in list(region.ops):
        if op.region is not None:
            made += part_pins(module, op.region)
        elif op.definition.rule(op) is not None and not isinstance(op.definition, Identity):
            b = Builder.after(module.registry, op)
            for value in op.results:
                pin = value.type
                if not isinstance(pin, TensorType) or not pin.placed:
                    continue
                value.type, users = pin.unplaced(), list(value.uses)
                place = b.value(
                    "stg.sharding_constraint", [value], type=pin, hint=f"{value.name}_placed"
                )
                for user, index in users:
                    user.set_operand(index, place)
                if place.producer is not None:
                    made.append(place.producer)
    return made


def _check_parts(value: Value, pin: TensorType) -> None:
    """Refuse a pin that makes parts of a value which is whole: their sum would count it once for
    each rank."""
    op, has = value.producer, value.tensor.partial
    rest = [a for a in pin.partial_axes if a not in value.tensor.partial_axes]
    what = f"whole, not in parts over {', '.join(rest)}"
    if has and pin.partial and has.kind != pin.partial.kind:
        what = f"in parts of a {has.kind}"
    elif not rest:
        return
    message = f"'{op.name if op else ''}' gives %{value.name} {what}: {pin}"
    raise error(message, value.loc, remedy=MAKE_PARTS)


def join_pins(places: list[Operation]) -> None:
    """Take away the places that change nothing. Raises `DiagnosticError` for a pinned partial sum
    that the op does not leave."""
    for place in places:
        (value,), pin = place.operands, place.result.tensor
        _check_parts(value, pin)
        if value.type == place.result.type:
            place.result.replace_with(value)
            place.erase()
