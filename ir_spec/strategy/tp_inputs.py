"""Whether inputs of split products are kept for backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.ir_spec.strategy.statement import (
    Flag,
    FlagValues,
    Record,
    Statement,
    parameter,
)


@dataclass(frozen=True)
class TpInputsRule(Record):
    """Whether backward gathers the inputs of split matmuls again."""

    policy: str = parameter(
        "name",
        "regather or save_gathered",
        default="regather",
        required=True,
        positional=True,
        choices=("regather", "save_gathered"),
        flag=Flag(
            "tp_inputs",
            "Gather inputs of split matmuls again in backward, or keep them.",
            needs=("tp", "sp"),
            tries=("save-gathered", "regather"),
            rare=True,
        ),
    )


class TpInputsOp(Statement):
    """Whether backward gathers the inputs of split matmuls again (regather) or keeps them
    (save-gathered)."""

    name, record = "stg.tp_inputs", TpInputsRule
    example = "stg.tp_inputs[regather]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "tp" in request.axes:
            yield {"policy": "regather", **self.flag_values(request)}
