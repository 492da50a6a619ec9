"""How long gradients are alive."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import (
    Flag,
    Record,
    Section,
    Statement,
    parameter,
)

LIFETIMES = ("persistent", "freed")


@dataclass(frozen=True)
class GradientsRule(Record):
    """How long gradients are alive."""

    lifetime: str = parameter(
        "name",
        "persistent: from step to step; freed: from backward to the end of the step",
        default="persistent",
        choices=LIFETIMES,
        flag=Flag(
            "grads",
            "Gradients have buffers that persist from step to step, or are freed before forward.",
            rare=True,
            software=True,
        ),
    )


class GradientsOp(Statement):
    """How long gradients are alive: in buffers that persist, as those of Megatron-LM do, or from
    where backward makes them to the end of the step (`freed`), so that forward has none, as with
    `zero_grad(set_to_none=True)` of PyTorch.

    Sums over several microbatches are there from the first backward on, beside the forward of the
    next microbatch: they count as persistent either way.
    """

    name, record = "stg.gradients", GradientsRule
    section = Section.MEMORY
    training = "there are no gradients"
    example = "stg.gradients[lifetime = freed]"
