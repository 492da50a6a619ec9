"""Parts of a model with separate meshes and strategies."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

#: The part with everything that no statement names.
MAIN = "main"
#: The VALUE of a part with the feed-forward of all layers.
FEED_FORWARD = "feed-forward"


class PartRule(Record):
    """A part of the model with its own mesh and strategy: the computation of a value."""

    name: str = parameter("name", "what the part is called", required=True, positional=True)
    of: tuple[str, ...] = parameter("values", "the value that the part computes")
    feed_forward: bool = parameter(
        "flag", "of a step of serving: what each layer does after its attention, in place of `of`"
    )
    batches: int = flagged(
        "part_batches",
        "With a part that has the feed-forward: parts of the batch that take turns in each layer, "
        "so that both pods compute (default 2).",
        "int",
        default=2,
        least=1,
        most=26,  # their names end with a letter
        needs=("part",),
        rare=True,
    )


class PartOp(Statement):
    """A part of the model: the operations from which a value is computed, or with `feed_forward`
    what each layer does after its attention. All others are the part `main`.

    A job has a pod for each part, with its own mesh and strategy; `cut-part` removes the other
    parts from its module. In a module that is not cut, the statement has no effect.
    """

    name, record, repeats = "stg.part", PartRule, True
    section = Section.PARTS
    flags = (
        Flag(
            "part",
            "Give a part of the model its own mesh and strategy; VALUE is its result: "
            "'encoder=e: tp=2,dp=2', or feed-forward, of all layers in a step of serving. May be "
            "given several times.",
            "parts",
            (),
            metavar="NAME=VALUE:FLAGS",
        ),
    )
    example = "stg.part[encoder, of = e]"

    def from_flags(self, request: FlagValues) -> Statements:
        for part in request["part"]:
            if part.value == FEED_FORWARD:
                yield {"name": part.name, "feed_forward": True, **self.flag_values(request)}
            else:
                yield {"name": part.name, "of": part.value}
