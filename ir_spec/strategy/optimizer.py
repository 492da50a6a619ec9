"""The optimizer, and the norm of gradients that it clips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.ir.expr import Expr, const
from stagec.ir_spec.strategy.statement import (
    FlagValues,
    Record,
    Statement,
    parameter,
)


@dataclass(frozen=True)
class OptimizerRule(Record):
    """The optimizer, and the largest norm of the gradients."""

    kind: str = parameter(
        "name",
        "adamw or none",
        default="adamw",
        required=True,
        positional=True,
        choices=("adamw", "none"),
    )
    clip: Expr = parameter("ratio", "the largest gradient norm", default=const(1), least=0)


class OptimizerOp(Statement):
    """The optimizer: AdamW with clipping of the gradient norm to `clip` (0: no clipping)."""

    name, record = "stg.optimizer", OptimizerRule
    training = "there is no optimizer"
    example = "stg.optimizer[adamw, clip = 1]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        yield {"kind": "adamw", "clip": 1}
