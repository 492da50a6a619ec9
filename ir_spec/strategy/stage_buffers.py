"""How long a pipeline stage keeps what it receives and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import (
    Flag,
    Record,
    Section,
    Statement,
    parameter,
)

#: Before the first microbatch, for all of them.
AHEAD = "ahead"
SENT, BACKWARD, STEP, NEXT = "sent", "backward", "step", "next"


@dataclass(frozen=True)
class StageBuffersRule(Record):
    """How long a pipeline stage keeps what it receives and what it returns."""

    received: str = parameter(
        "name",
        "arrive: a message has a buffer from its arrival to its last use; ahead: one for each "
        "microbatch, from step to step",
        default="arrive",
        choices=("arrive", AHEAD),
        flag=Flag(
            "stage_receives",
            "Receive buffers of a pipeline: from arrival to last use (arrive), or one for each "
            "microbatch, kept across steps (ahead).",
            metavar="arrive|ahead",
            needs=("pp",),
            rare=True,
            software=True,
        ),
    )
    results: str = parameter(
        "name",
        "what a stage returns stays until it is sent; until the backward of its microbatch ends "
        "(backward); that of the last stage until the step ends, joined in a copy (step)",
        default=SENT,
        choices=(SENT, BACKWARD, STEP),
        flag=Flag(
            "stage_results",
            "The result of a pipeline stage is freed when it is sent, when the backward of its "
            "microbatch ends (backward), or in the last stage when the step ends (step).",
            metavar="sent|backward|step",
            needs=("pp",),
            rare=True,
            software=True,
        ),
    )
    gradients: str = parameter(
        "name",
        "the gradient that a stage sends stays until it is sent, or until that of the next "
        "microbatch is there, where a rank has one part of the model (next)",
        default=SENT,
        choices=(SENT, NEXT),
        flag=Flag(
            "stage_gradients",
            "The gradient that a pipeline stage sends is freed when it is sent, or when that of "
            "the next microbatch exists, if a rank has one part of the model (next).",
            metavar="sent|next",
            needs=("pp",),
            rare=True,
            software=True,
        ),
    )


class StageBuffersOp(Statement):
    """How long a pipeline stage keeps what it receives and what it returns.

    `received = ahead`: `PipelineStage` of PyTorch makes a buffer for the input of each microbatch,
    and one for the gradient of each output, in the first step, and keeps them
    (torch/distributed/pipelining/stage.py: `_setup_forward_recv_info`,
    `_setup_backward_recv_info`). Backward finds the input in it.

    `results = backward`: it has the output of a microbatch until its backward has ended
    (`fwd_cache`, from which `backward_one_chunk` takes it), of the last stage the logits.
    `results = step`: a schedule returns the outputs of the last stage, so it has all of them until
    the next step begins (`output_chunks`), and joins them in a copy (`_merge_outputs`,
    `return_outputs = True`).

    `gradients = next`: `ScheduleGPipe` and `Schedule1F1B` name the messages of a backward until
    those of the next one are made (`bwd_sends`); schedules of several parts on a rank do not.
    """

    name, record = "stg.stage_buffers", StageBuffersRule
    section = Section.MEMORY
    training = "there is no backward for which stages keep results"
    example = "stg.stage_buffers[received = ahead, results = backward]"
