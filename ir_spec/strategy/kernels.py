"""Which kernels of a library compute an op."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import (
    Flag,
    Record,
    Section,
    Statement,
    parameter,
)

DEVICE = "device"
#: Kernels of fused attention; `math` is none, but the ops that it consists of.
ATTENTION = ("math", "flash_1", "flash_2", "flash_3", "cudnn", "triton")


@dataclass(frozen=True)
class KernelsRule(Record):
    """Which kernels of a library compute an op."""

    attention: str = parameter(
        "name",
        "math: its products and softmax; flash_1, flash_2, flash_3: FlashAttention; cudnn; triton: "
        "the first FlashAttention in Triton; device: the kernel that the machine was measured with",
        default=DEVICE,
        choices=(DEVICE, *ATTENTION),
        flag=Flag(
            "attention",
            "The kernel of attention: FlashAttention 1, 2 or 3, that of cuDNN or Triton, its "
            "products and softmax one by one (math), or the one that the machine was measured "
            "with (device).",
            rare=True,
        ),
    )


class KernelsOp(Statement):
    """Which kernels of a library compute an op, as far as that says how long it takes, or what
    there is in memory.

    A kernel of `attention` has constants of its own in the text of a machine
    (`efficiency.attention.kernels`); on a machine without them its own are taken, and the answer
    says so. With `math` attention is no kernel: its two products and the softmax between them are
    ops (`expand-attention`).
    """

    name, record = "stg.kernels", KernelsRule
    section = Section.KERNELS
    example = "stg.kernels[attention = flash_2]"
