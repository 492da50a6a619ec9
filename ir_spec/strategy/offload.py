"""What waits in the memory of the host."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter

OFFLOAD = ("activations", "optimizer")


@dataclass(frozen=True)
class OffloadRule(Record):
    """What lives in host memory, and whether its copies are nodes of the trace."""

    what: tuple[str, ...] = parameter(
        "names",
        "activations, optimizer or both",
        required=True,
        positional=True,
        choices=OFFLOAD,
        flag=Flag(
            "offload",
            "Keep what the blocks stash, or the optimizer's state, in host memory.",
            default="",
            metavar="activations,optimizer",
        ),
    )
    nodes: bool = parameter(
        "flag",
        "the copies are nodes of the trace",
        flag=Flag(
            "memory_nodes",
            "Write the copies of --offload as nodes of the trace (MEM_STORE, MEM_LOAD).",
            needs=("offload",),
            rare=True,
        ),
    )


class OffloadOp(Statement):
    """What lives in host memory and is copied to the device where it is used.

    `activations`: what the blocks stash; `optimizer`: master copies and moments. With `nodes` the
    copies are nodes of the trace, which run beside computations.
    """

    name, record = "stg.offload", OffloadRule
    section = Section.MEMORY
    training = "nothing waits for a backward"
    example = "stg.offload[optimizer]"
