"""Buffers of experts of a fixed capacity."""

from fractions import Fraction

from stagec.ir.expr import Expr
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, parameter


class CapacityRule(Record):
    """The capacity factor of expert buffers, if one is given."""

    factor: Expr | None = parameter(
        "ratio",
        required=True,
        least=1,
        flag=Flag(
            "capacity_factor",
            "Rows of the expert buffers over those of balanced load, such as 5/4.",
            default=Fraction(1),
            needs=(EXPERTS,),
            rare=True,
        ),
    )


class CapacityOp(Statement):
    """The capacity factor of expert buffers: rows beyond balanced load, padded with zeros."""

    name, record = "stg.capacity", CapacityRule
    example = "stg.capacity[factor = 5/4]"
