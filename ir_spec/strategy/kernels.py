"""Which ops of a model run as several kernels."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import (
    Flag,
    Record,
    Section,
    Statement,
    parameter,
)


@dataclass(frozen=True)
class KernelsRule(Record):
    """Which ops of a model run as several kernels."""

    eager: tuple[str, ...] = parameter(
        "names",
        "ops that run operation by operation, as in (swiglu, rmsnorm)",
        required=True,
        flag=Flag(
            "eager",
            "Run these ops operation by operation, as PyTorch code that no compiler has seen and "
            "no fused kernel replaces: swiglu, geglu, rmsnorm. Backward keeps what each operation "
            "saves.",
            "names",
            "",
            metavar="OP,...",
            rare=True,
        ),
    )


class KernelsOp(Statement):
    """Which ops of a model run operation by operation: each becomes the ops that PyTorch runs where
    no compiler sees the code and no library has a kernel for all of it. Backward then keeps what
    each of these saves.

    `swiglu`, `geglu`: the activation of the gate, then the product; backward keeps the activated
    gate beside gate and up. `rmsnorm`: in fp32, cast back and scaled, as `LlamaRMSNorm` of
    transformers; backward keeps the input in fp32 and the normalized input, where the kernel of
    `torch.nn.RMSNorm` keeps its input. A zero-centered scale is applied in fp32, as in
    `Gemma3RMSNorm`.
    """

    name, record = "stg.kernels", KernelsRule
    section = Section.KERNELS
    example = "stg.kernels[eager = (swiglu, rmsnorm)]"
