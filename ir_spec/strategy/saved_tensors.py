"""How long backward keeps what forward saved for it."""

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged


class SavedTensorsRule(Record):
    """How long backward keeps what forward saved for it."""

    until: str = flagged(
        "saved_tensors",
        "Backward keeps a saved tensor until its last use, or until the operation or checkpoint "
        "that saved it has all its gradients (node).",
        choices=("last_use", "node"),
        metavar="last-use|node",
        rare=True,
        software=True,
    )
    first: str = flagged(
        "first_saved",
        "If nothing before the layers is trained, the first layer saves what all others save "
        "(all), or leaves out what only the gradient of its input needs (needed).",
        doc=(
            "what the first layer keeps for the gradient of its input where nothing before it is "
            "trained: what all layers keep (all), or nothing (needed)"
        ),
        choices=("all", "needed"),
        metavar="all|needed",
        rare=True,
        software=True,
    )
    blocks: str = flagged(
        "recompute_blocks",
        "A checkpoint computes its block again up to the last operation that backward needs "
        "(needed), or all of it (whole), and keeps the results (replayed).",
        choices=("needed", "whole", "replayed"),
        metavar="needed|whole|replayed",
        needs=("recompute", "saved_tensors"),
        rare=True,
        software=True,
    )


class SavedTensorsOp(Statement):
    """How long backward keeps what forward saved for it.

    `node`: as in PyTorch's autograd. A node of its graph releases its saved tensors when all of its
    gradients are computed (torch/csrc/autograd/engine.cpp: `call_function`, `release_variables`),
    so a product of two activations keeps both until then. A checkpoint of blocks keeps the input of
    a block until the backward of the block ends (torch/utils/checkpoint.py:
    `_CheckpointFrame.recompute_fn`, `CheckpointFunction.backward`). `last_use`: both are freed
    after the operation that reads them last.

    `first = needed`: an operation of PyTorch saves only what is needed for the gradients of those
    inputs that require one (tools/autograd/gen_variable_type.py: `guard_for`).

    `blocks = whole`: a checkpoint without `early_stop` runs all of its block again
    (torch/utils/checkpoint.py: `_checkpoint_hook.unpack_hook`), and takes what a list of
    `stg.recompute` has kept where it comes to it. `needed`: it stops behind the last operation that
    backward needs; what the list has kept of the others is there until the backward of the block
    ends. `replayed`: backward calls a block and then the backward of its results, which it has
    until the end, so that `full` is `full_replay` (megatron/core/tensor_parallel/random.py:
    `CheckpointFunction.backward`).
    """

    name, record = "stg.saved_tensors", SavedTensorsRule
    section = Section.MEMORY
    training = "there is no backward that saves tensors"
    example = "stg.saved_tensors[until = node]"
