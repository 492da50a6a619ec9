"""The number of tokens that each expert receives."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.traits import Declares
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, parameter


class ExpertLoadRule(Record):
    """Relative loads of the experts, in one layer with experts or in all others."""

    loads: tuple[int, ...] = parameter(
        "ints",
        "one for each expert, 0 or more",
        required=True,
        flag=Flag(
            "expert_load",
            "Tokens that each expert receives: a JSON file with a list, or with a list for each "
            "layer; or the list itself.",
            "loads",
            needs=(EXPERTS,),
            rare=True,
        ),
    )
    layer: int | None = parameter("int", "the layer (default: all others)", default=None, least=0)


class ExpertLoadOp(Statement):
    """The relative number of tokens that each expert receives.

    With `layer`, the statement applies to one layer, counted from 0 among those with experts;
    without it, to all layers without another statement. Ranks receive whole rows, distributed by
    largest remainders.
    """

    name, record, repeats = "stg.expert_load", ExpertLoadRule, True
    traits = (Declares("expert_loads"),)
    example = "stg.expert_load[loads = (5, 1, 1, 1), layer = 0]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        loads = op.integers("loads")
        if any(n < 0 for n in loads) or not any(loads):
            yield "expects loads of 0 or more, at least one of them above 0"

    def from_flags(self, request: FlagValues) -> Statements:
        loads = request["expert_load"]
        if loads and not isinstance(loads[0], tuple):
            yield {"loads": loads}
            return
        for layer, row in enumerate(loads):
            yield {"loads": row, "layer": layer}
