"""Parts of a model with a mesh and a strategy of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter

#: The part that has what no statement names.
MAIN = "main"


class PartRule(Record):
    """A part of the model with a mesh and a strategy of its own: what a value is computed of."""

    name: str = parameter("name", "what the part is called", required=True, positional=True)
    of: tuple[str, ...] = parameter("values", "the value that the part computes", required=True)


class PartOp(Statement):
    """A part of the model: the operations from which a value is computed. All others are the part
    `main`.

    A job has a pod for each part, with a mesh and a strategy of its own; `cut-part` leaves it
    its part. In a module that is not cut the statement changes nothing.
    """

    name, record, repeats = "stg.part", PartRule, True
    section = Section.PARTS
    flags = (
        Flag(
            "part",
            "Give a part of the model its own mesh and strategy; VALUE is its result: "
            "'encoder=e: tp=2,dp=2'. May be given several times.",
            "parts",
            (),
            metavar="NAME=VALUE:FLAGS",
        ),
    )
    example = "stg.part[encoder, of = e]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        for part in request["part"]:
            yield {"name": part.name, "of": part.value}
