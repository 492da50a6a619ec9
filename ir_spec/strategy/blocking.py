"""Collectives that block computation."""

from typing import Any

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.axes import REPLICAS
from stagec.ir_spec.strategy.flag_values import Axes, FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, parameter


class BlockingRule(Record):
    """Collectives of activations over these axes block."""

    over: Axes = parameter(
        "axes",
        "mesh axes",
        required=True,
        flag=Flag(
            "async_tp",
            "Whether computations overlap with collectives of tensor parallelism.",
            "switch",
            True,
            needs=("tp",),
            rare=True,
        ),
    )


class BlockingOp(Statement):
    """Makes collectives of activations over these axes blocking: they run in the stream of
    computations.

    A computation that is issued after such a collective waits for it, even if it does not use the
    result, and the collective waits for the computation before it. Without the statement, there are
    only data dependencies between the two streams (asynchronous tensor parallelism).
    """

    name, record, repeats, subject = "stg.blocking", BlockingRule, True, "over"
    example = "stg.blocking[over = tp]"

    def from_flags(self, request: FlagValues) -> Statements:
        if "tp" in request.axes and not request["async_tp"]:
            yield {"over": request.over("tp", REPLICAS)}

    def flags_of(self, op: Operation) -> dict[str, Any]:
        return {"async_tp": False} if "tp" in op.names("over") else {}
