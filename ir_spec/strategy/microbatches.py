"""The microbatches of a step."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter


class MicrobatchesRule(Record):
    """The number of microbatches, and the symbol of the batch that they split."""

    count: int = parameter("int", "how many", default=1, required=True, least=1)
    split: str = parameter("dim", "the batch symbol", default="B")


class MicrobatchesOp(Statement):
    """Splits the batch into microbatches whose gradients are accumulated."""

    name, record = "stg.microbatches", MicrobatchesRule
    section = Section.DATA
    flags = (
        Flag(
            "microbatches",
            "Microbatches whose gradients are accumulated (default: 1, or 2 per pipeline stage; 2 "
            "with --afd).",
            "int",
            0,
            least=0,
        ),
    )
    example = "stg.microbatches[count = 4]"

    def from_flags(self, request: FlagValues) -> Statements:
        stages = request.ranks("pp")
        take_turns = 2 if request["afd"] and stages > 1 else 0
        count = microbatches(request["microbatches"] or take_turns, stages)
        if count > 1:
            yield {"count": count}


def microbatches(given: int, stages: int) -> int:
    """The number of microbatches of a job; if `given` is 0, a default for the number of pipeline
    stages."""
    return given or (2 * stages if stages > 1 else 1)
