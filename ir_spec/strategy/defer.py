"""Reductions of partial sums that wait for the end of the step."""

from stagec.ir_spec.strategy.axes import MORE_KEYS, REPLICAS, key_heads
from stagec.ir_spec.strategy.flag_values import Axes, FlagValues, Statements
from stagec.ir_spec.strategy.statement import Record, Statement, parameter


class DeferRule(Record):
    """Partial sums over these axes are not reduced at once."""

    over: Axes = parameter("axes", "mesh axes", required=True)


class DeferOp(Statement):
    """Passes partial sums over these axes through products and rotations, and reduces them together
    with the next required reduction.

    This is for axes over which a value is replicated while other operands of its op are split, such
    as key and value heads if tensor parallelism has more ranks than there are heads.
    """

    name, record, repeats = "stg.defer", DeferRule, True
    example = "stg.defer[over = tpr]"

    def from_flags(self, request: FlagValues) -> Statements:
        replicas = REPLICAS in request.axes and request["dcp"] == 1
        if replicas and "tp" in request.axes and key_heads(request.sizes):
            yield {"over": request.over(*MORE_KEYS, REPLICAS)}
