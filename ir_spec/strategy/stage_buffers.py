"""How long a pipeline stage keeps what it receives and what it returns."""

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: Buffers are allocated for all microbatches before the first one.
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

    `received = ahead`: `PipelineStage` of PyTorch allocates a buffer for the input of each
    microbatch, and one for the gradient of each output, in the first step, and keeps them
    (torch/distributed/pipelining/stage.py: `_setup_forward_recv_info`,
    `_setup_backward_recv_info`). Backward reads the input from its buffer.

    `results = backward`: the stage keeps the output of a microbatch until its backward has ended
    (`fwd_cache`, from which `backward_one_chunk` takes it); in the last stage, these are the
    logits. `results = step`: a schedule returns the outputs of the last stage, so it keeps all of
    them until the next step begins (`output_chunks`), and copies them into one tensor
    (`_merge_outputs`, `return_outputs = True`).

    `gradients = next`: `Schedule1F1B` holds references to the messages of a backward until those of
    the next one exist (`bwd_sends`); other schedules do not.

    `graph = weights`: a split backward runs with `retain_graph = True`
    (torch/distributed/pipelining/_backward.py: `stage_backward_input`), so all tensors that forward
    saved are kept until the gradients of weights are computed, and the gradient of each received
    input is kept with the buffer of that input (`inp.grad`), from step to step. Each weight is a
    call of autograd (`stage_backward_weight`), for which a checkpoint recomputes its block; the
    tensors that other operations of the block save are kept as long as their graph
    (torch/utils/checkpoint.py: `_CheckpointFrame.recomputed`). The first stage has a single
    backward, at the time of its weights (`backward_one_chunk`).
    """

    name, record = "stg.stage_buffers", StageBuffersRule
    section = Section.MEMORY
    rare, software, needs = True, True, ("pp",)
    training = "there is no backward for which stages keep results"
    example = "stg.stage_buffers[received = ahead, results = backward]"
