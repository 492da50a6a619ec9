"""How long a pipeline stage keeps what it receives and what it returns."""

from __future__ import annotations

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: Before the first microbatch, for all of them.
AHEAD = "ahead"
SENT, BACKWARD, STEP, NEXT, WEIGHTS = "sent", "backward", "step", "next", "weights"


class StageBuffersRule(Record):
    """How long a pipeline stage keeps what it receives and what it returns."""

    received: str = flagged(
        "stage_receives",
        "Receive buffers of a pipeline: from arrival to last use (arrive), or one for each "
        "microbatch, kept across steps (ahead).",
        choices=("arrive", AHEAD),
    )
    results: str = flagged(
        "stage_results",
        "The result of a pipeline stage is freed when it is sent, when the backward of its "
        "microbatch ends (backward), or in the last stage when the step ends (step).",
        choices=(SENT, BACKWARD, STEP),
    )
    gradients: str = flagged(
        "stage_gradients",
        "The gradient that a pipeline stage sends is freed when it is sent, or when that of the "
        "next microbatch exists, in 1F1B (next).",
        choices=(SENT, NEXT),
    )
    graph: str = flagged(
        "stage_graph",
        "Where a schedule splits backward, what forward saved is freed when it is last used, "
        "or when the gradients of weights of its microbatch have been made (weights).",
        choices=("used", WEIGHTS),
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

    `gradients = next`: `Schedule1F1B` names the messages of a backward until those of the next one
    are made (`bwd_sends`); other schedules do not.

    `graph = weights`: a split backward runs with `retain_graph = True`
    (torch/distributed/pipelining/_backward.py: `stage_backward_input`), so all that forward saved
    is there until the gradients of weights are made, and the gradient of each received input stays
    at the buffer of that input (`inp.grad`), from step to step. Each weight is a call of autograd
    (`stage_backward_weight`), for which a checkpoint computes its block again; what other
    operations of it save stays while their graph does (torch/utils/checkpoint.py:
    `_CheckpointFrame.recomputed`). The first stage has one backward, where its weights are due
    (`backward_one_chunk`).
    """

    name, record = "stg.stage_buffers", StageBuffersRule
    section = Section.MEMORY
    rare, software, needs = True, True, ("pp",)
    training = "there is no backward for which stages keep results"
    example = "stg.stage_buffers[received = ahead, results = backward]"
