"""Splits of a sequence that become splits of heads for attention (Ulysses)."""

from stagec.ir_spec.strategy.axes import HEADS
from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Record, Statement, parameter


class ExchangeRule(Record):
    """The split of a dimension moves to other dimensions for attention."""

    dim: str = parameter("dim", "the dimension", required=True, positional=True)
    into: tuple[str, ...] = parameter(
        "dims", "the dimensions that are split instead", required=True
    )


class ExchangeOp(Statement):
    """Moves the split of a dimension to other dimensions around an op that would treat it
    specially.

    `stg.exchange[S, into = (H, G)]` is Ulysses: an all_to_all of queries, keys and values before
    attention, and of its result after.
    """

    name, record, repeats = "stg.exchange", ExchangeRule, True
    example = "stg.exchange[S, into = (H, G)]"

    def from_flags(self, request: FlagValues) -> Statements:
        if "cp" in request.axes and request.cp_mode == "ulysses":
            into = tuple(n for n in HEADS if n in request.sizes)
            yield from ({"dim": name, "into": into} for name in request.context)
