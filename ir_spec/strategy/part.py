"""Parts of a model with separate meshes and strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter

#: The part with everything that no statement names.
MAIN = "main"


class PartRule(Record):
    """A part of the model with its own mesh and strategy: the computation of a value."""

    name: str = parameter("name", "what the part is called", required=True, positional=True)
    of: tuple[str, ...] = parameter("values", "the value that the part computes", required=True)


class PartOp(Statement):
    """A part of the model: the operations from which a value is computed. All others are the part
    `main`.

    A job has a pod for each part, with its own mesh and strategy; `cut-part` removes the other
    parts from its module. In a module that is not cut, the statement has no effect.
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
