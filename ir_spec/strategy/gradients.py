"""How long gradients are alive, and of which rows of tables."""

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
    """How long gradients are alive, and of which rows of tables."""

    lifetime: str = parameter(
        "name",
        "persistent: from step to step; freed: from backward to the end of the step",
        default="persistent",
        choices=LIFETIMES,
        flag=Flag(
            "grads",
            "Gradient buffers persist across steps, or are freed before forward.",
            rare=True,
            software=True,
        ),
    )
    tables: str = parameter(
        "name",
        "of a table whose rows are split: split, as the table is; whole: of all rows on each rank",
        default="split",
        choices=("split", "whole"),
        flag=Flag(
            "grad_tables",
            "Gradients of split embedding tables: split, or of all rows on each rank (whole).",
            metavar="split|whole",
            needs=("tp",),
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

    `tables = whole`: a rank makes the gradient of all rows of a table whose rows are split, a
    partial sum where ranks have other tokens, as DTensor, which has no rule for parts of the rows
    (torch/distributed/tensor/_ops/_embedding_ops.py: `embedding_dense_backward_strategy`). FSDP2
    reduces it where the backward of its unit ends (_fully_shard/_fsdp_param.py:
    `_get_grad_inner_tensor`), an optimizer in its update.
    """

    name, record = "stg.gradients", GradientsRule
    section = Section.MEMORY
    training = "there are no gradients"
    example = "stg.gradients[lifetime = freed]"
