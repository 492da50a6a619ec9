"""How long gradients are alive, and of which rows of tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stagec.ir_spec.strategy.statement import (
    Flag,
    FlagValues,
    Record,
    Section,
    Statement,
    parameter,
)

LIFETIMES = ("persistent", "freed")
REDUCED = ("each", "once", "staged")


@dataclass(frozen=True)
class GradientsRule(Record):
    """How long gradients are alive, and of which rows of tables."""

    lifetime: str = parameter(
        "name",
        choices=LIFETIMES,
        flag=Flag(
            "grads",
            "Gradient buffers persist across steps, or are freed before forward.",
        ),
    )
    tables: str = parameter(
        "name",
        choices=("split", "whole"),
        flag=Flag(
            "grad_tables",
            "Gradients of split embedding tables: split, or of all rows on each rank (whole).",
            needs=("tp",),
        ),
    )
    reduced: str = parameter(
        "name",
        "of ZeRO-2 and 3: in each microbatch (each); once, behind the last one; once in a pipeline "
        "(staged)",
        default="each",
        choices=REDUCED,
        flag=Flag(
            "grad_reduction",
            "Under ZeRO-2 and 3 gradients are reduced in each microbatch, once behind the last "
            "one, or once in a pipeline only (staged).",
            metavar="each|once|staged",
            needs=("zero",),
            rare=True,
            software=True,
        ),
    )


class GradientsOp(Statement):
    """How long gradients are alive: in buffers that persist, as those of Megatron-LM do, or from
    where backward makes them to the end of the step (`freed`), so that forward has none, as with
    `zero_grad(set_to_none=True)` of PyTorch.

    Sums over several microbatches are there from the first backward on, beside the forward of the
    next microbatch: they count as persistent. In a pipeline the plan has them from where the first
    microbatch of a stage makes them, as `AccumulateGrad` takes the first gradient for the sum; a
    later one is made beside it, and added.

    `tables = whole`: a rank makes the gradient of all rows of a table whose rows are split, a
    partial sum where ranks have other tokens, as DTensor, which has no rule for parts of the rows
    (torch/distributed/tensor/_ops/_embedding_ops.py: `embedding_dense_backward_strategy`). FSDP2
    reduces it where the backward of its unit ends (_fully_shard/_fsdp_param.py:
    `_get_grad_inner_tensor`), an optimizer in its update.

    `reduced = once`: under ZeRO-2 and 3 a rank adds up whole gradients over the microbatches, in
    the type in which they are reduced, and reduces them once, layer by layer: what FSDP2 does
    without `set_requires_gradient_sync` (_fully_shard/_fsdp_param_group.py: `post_backward`;
    _fsdp_param.py: `to_accumulated_grad_if_needed`), as `no_sync` of accelerate, and in a pipeline
    (`staged`) as `PipelineStage` (torch/distributed/pipelining/stage.py:
    `backward_maybe_with_nosync`, `perform_reduce_grad`).
    """

    name, record = "stg.gradients", GradientsRule
    section = Section.MEMORY
    rare, software = True, True
    training = "there are no gradients"
    example = "stg.gradients[lifetime = freed]"

    def flag_values(self, request: FlagValues) -> dict[str, Any]:
        values = super().flag_values(request)
        if not request["zero"]:
            values.pop("reduced", None)
        return values
