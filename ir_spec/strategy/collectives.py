"""Which kernels compute collectives."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter

LIBRARY, ONE_SHOT, TWO_SHOT = "library", "one_shot", "two_shot"


@dataclass(frozen=True)
class CollectivesRule(Record):
    """Which kernels compute collectives."""

    all_reduce: str = parameter(
        "name",
        "library: those of the communication library; one_shot: each rank reads all operands; "
        "two_shot: that, or each adds a part and reads the others, whichever is faster",
        default=LIBRARY,
        choices=(LIBRARY, ONE_SHOT, TWO_SHOT),
        flag=Flag(
            "all_reduce",
            "Who adds up over ranks of a node: the communication library, or kernels that read the "
            "memory of other ranks (one-shot: all operands; two-shot: that, or each adds a part), "
            "where they are faster.",
            rare=True,
            software=True,
        ),
    )
    below: int = parameter(
        "int",
        "bytes up to which kernels of an engine are taken",
        default=8 << 20,
        least=1,
        flag=Flag(
            "all_reduce_below",
            "Bytes up to which --all-reduce holds; the library adds what is larger.",
            metavar="BYTES",
            needs=("all_reduce",),
            rare=True,
            software=True,
        ),
    )


class CollectivesOp(Statement):
    """Which kernels compute collectives.

    Engines of serving have kernels of their own for small all_reduces within a node, in which each
    rank reads the memory of the others (vLLM, csrc/custom_all_reduce.cuh; TensorRT-LLM,
    customAllReduceKernels.cu): `one_shot`, all operands, or `two_shot`, each rank adds a part of
    the buffer and then reads the other sums. They are taken for up to `below` bytes where they are
    faster than the library. Their constants are those of the machine
    (`efficiency.network.LEVEL.direct`); one without them has the library.
    """

    name, record = "stg.collectives", CollectivesRule
    section = Section.KERNELS
    example = "stg.collectives[all_reduce = two_shot, below = 8388608]"
