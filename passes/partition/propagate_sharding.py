"""propagate-sharding: gives every value a placement.

A pin of a result states the placement of the value, not how its op computes it. While the pass
searches placements, a pin is a `stg.sharding_constraint` after the op. The op may then get another
placement if fewer bytes move:

    %y = stg.softmax(%x) : f32[A, B@x]      before
    %y = stg.softmax(%x) : f32[A, B]        while placements are found
    %y_placed = stg.sharding_constraint(%y) : f32[A, B@x]

If the result of the op has the placement of the pin, the constraint is removed again.
"""

from collections.abc import Sequence
from dataclasses import replace

from stagec.api import AxisUse, Module, Operation, Partial, Pass, Phase, Region, TensorType, Value
from stagec.ir_spec.ops.layout import Identity
from stagec.sharding.assignment import MAKE_PARTS
from stagec.sharding.propagate import Propagation, is_carried
from stagec.sharding.reshard_cost import Split
from stagec.sharding.row_sources import check_rows


class PropagateSharding(Pass):
    """Spread the placements of arguments and pinned values over all values.

    They are propagated by the rules of the ops: first placements of priority 0, then those at rest
    (`!1`, `!2`).

    Before:
        stg.func @f(%x: bf16[B@dp, S, D], %w: bf16[D, F@tp]) {
          %y = stg.einsum["bsd,df->bsf"](%x, %w) : bf16[B, S, F]
          stg.return(%y)
        }
    After:
        stg.func @f(%x: bf16[B@dp, S, D], %w: bf16[D, F@tp]) {
          %y = stg.einsum["bsd,df->bsf"](%x, %w) : bf16[B@dp, S, F@tp]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED
    until = Phase.DIFFERENTIATED
    gives = Phase.SHARDED

    def run(self, module: Module) -> None:
        if module.phase == Phase.SHAPED.label and module.ops("stg.strategy"):
            module.diagnostics.remark(
                "the strategy is not applied: run 'apply-strategy' before 'propagate-sharding'",
                module.ops("stg.strategy")[0].loc,
            )
        propagate_sharding(module)


def propagate_sharding(module: Module) -> None:
    """Give every value of every function a placement, in place.

    Raises `DiagnosticError` for pins that contradict each other, and for contradictory placements
    of numbered rows.
    """
    for func in module.functions:
        constraints = _part_pins(module, func.body)
        propagation = Propagation(module, func.body, constraints)
        propagation.run()
        _write(func.body, propagation)
        _join_pins(constraints)
        check_rows(func.body)


# -- the types -------------------------------------------------------------------------------------


def _write(region: Region, propagation: Propagation) -> None:
    for arg in region.args:
        partial = arg.tensor.partial if region is propagation.region else _partial_of_arg(arg)
        arg.type = _settled(arg.tensor, propagation.split(arg), partial)
    for op in region.ops:
        if propagation.has_rule(op):
            for value in op.results:
                value.type = _settled(*propagation.result(op, value.index))
        if op.region is not None:
            _write(op.region, propagation)
            op.infer()
    region.returns = tuple(
        _settled(t, [d.split for d in t.dims], t.partial)
        if isinstance(t, TensorType) and t.placed
        else v.tensor
        for t, v in zip(region.returns, region.terminator.operands, strict=False)
    )


def _partial_of_arg(arg: Value) -> Partial | None:
    """A slice of an unreduced value is unreduced."""
    return None if is_carried(arg) else arg.region.owner.operands[arg.index].tensor.partial


def _settled(type_: TensorType, splits: Sequence[Split], partial: Partial | None) -> TensorType:
    """The type with this placement, without priorities."""
    each = [d.split_over(s) for d, s in zip(type_.dims, map(_final, splits), strict=True)]
    return replace(type_, dims=tuple(each), partial=partial, placed=True)


def _final(split: Split) -> Split:
    """A split without priorities."""
    return tuple([AxisUse(u.axis) if u.priority else u for u in split]) if split else ()


# -- pins ------------------------------------------------------------------------------------------


def _part_pins(module: Module, region: Region) -> list[Operation]:
    """Replace the pins of results of ops with rules by sharding constraints. Returns these."""
    made: list[Operation] = []
    for op in list(region.ops):
        if op.region is not None:
            made += _part_pins(module, op.region)
        elif op.definition.rule(op) is not None and not isinstance(op.definition, Identity):
            b = module.after(op)
            for value in op.results:
                pin = value.type
                if not isinstance(pin, TensorType) or not pin.placed:
                    continue
                value.type, hint = pin.unplaced(), f"{value.name}_placed"
                there = b.value("stg.sharding_constraint", [value], type=pin, hint=hint)
                value.replace_with(there)
                if there.producer is not None:
                    made.append(there.producer)
    return made


def _check_parts(value: Value, pin: TensorType) -> None:
    """Raise `DiagnosticError` for a pin that makes a complete value partial: the sum would count
    the value once per rank."""
    op, has = value.producer, value.tensor.partial
    rest = [a for a in pin.partial_axes if a not in value.tensor.partial_axes]
    what = f"whole, not unreduced over {', '.join(rest)}"
    if has and pin.partial and has.kind != pin.partial.kind:
        what = f"unreduced by {has.kind}"
    elif not rest:
        return
    message = f"'{op.name if op else ''}' gives %{value.name} {what}: {pin}"
    raise value.error(message, remedy=MAKE_PARTS)


def _join_pins(constraints: list[Operation]) -> None:
    """Remove the constraints that change nothing. Raises `DiagnosticError` for a pin to a partial
    sum that the op does not make."""
    for op in constraints:
        (value,), pin = op.operands, op.result.tensor
        _check_parts(value, pin)
        if value.type == pin:
            op.result.replace_with(value)
            op.erase()
