"""Attention whose keys and values circulate among the ranks."""

from stagec.ir_spec.ops.attention_core import ORDERS
from stagec.ir_spec.strategy.flag_values import FlagValues, Problems, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, flagged, parameter


class RingRule(Record):
    """Attention along a dimension passes its parts around the ranks, with this order of
    positions."""

    dim: str = parameter("dim", "the dimension", required=True, positional=True)
    order: str = flagged(
        "cp_order",
        "Order of the sequence over the ranks of a ring; zigzag balances the causal mask.",
        choices=ORDERS,
        rare=True,
    )


class RingOp(Statement):
    """Keeps attention split along a dimension: keys and values circulate among the ranks (ring
    attention, arXiv 2310.01889).

    With `order = zigzag`, the default, rank i of n has the chunks i and 2n-1-i of 2n, so that a
    causal mask leaves the same work to all ranks. With `order = plain` it has a contiguous chunk:
    the last rank has 2n-1 times the work of the first one.
    """

    name, record, repeats = "stg.ring", RingRule, True
    needs = ("cp",)
    flags = (
        Flag(
            "cp_mode",
            "How attention reads the whole sequence.",
            "choice",
            "ring",
            choices=("ring", "ulysses", "all-gather"),
        ),
    )
    example = "stg.ring[S, order = zigzag]"

    def from_flags(self, request: FlagValues) -> Statements:
        if "cp" in request.axes and request.cp_mode == "ring":
            order = request["cp_order"]
            yield from ({"dim": name, "order": order} for name in request.context)

    def problems(self, request: FlagValues) -> Problems:
        mode, order = request["cp_mode"], request["cp_order"]
        if mode != "ring" and order != "zigzag":
            message = (
                f"--cp-order {order} needs --cp-mode ring, found --cp-mode {mode}, which keeps "
                "the order of the sequence"
            )
            yield message, "leave --cp-order out"
