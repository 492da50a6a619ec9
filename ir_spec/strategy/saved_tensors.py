"""How long backward keeps what forward saved for it."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter


@dataclass(frozen=True)
class SavedTensorsRule(Record):
    """How long backward keeps what forward saved for it."""

    until: str = parameter(
        "name",
        choices=("last_use", "node"),
        flag=Flag(
            "saved_tensors",
            "Backward keeps a saved tensor until its last use, or until the operation or "
            "checkpoint that saved it has all its gradients (node).",
            metavar="last-use|node",
            rare=True,
            software=True,
        ),
    )


class SavedTensorsOp(Statement):
    """How long backward keeps what forward saved for it.

    `node`: as the autograd of PyTorch does. A node of its graph releases what it has saved when all
    of its gradients are there (torch/csrc/autograd/engine.cpp: `call_function`,
    `release_variables`), so a product of two activations keeps both until then. A checkpoint of
    blocks keeps the input of a block until the backward of the block ends
    (torch/utils/checkpoint.py: `_CheckpointFrame.recompute_fn`, `CheckpointFunction.backward`).
    `last_use`: both are freed behind the operation that reads them last.
    """

    name, record = "stg.saved_tensors", SavedTensorsRule
    section = Section.MEMORY
    training = "there is no backward that saves tensors"
    example = "stg.saved_tensors[until = node]"
