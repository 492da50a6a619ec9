"""Whether sums of split products begin before the product ends."""

from __future__ import annotations

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged


class TpOutputsRule(Record):
    """Whether sums of split products begin before the product ends."""

    policy: str = flagged(
        "tp_outputs",
        "Sum a split product after it ends (whole), or part by part while the rest of it runs "
        "(in-steps).",
        positional=True,
        choices=("whole", "in_steps"),
        needs=("tp",),
        rare=True,
    )


class TpOutputsOp(Statement):
    """Whether sums of split products begin before the product ends.

    A product whose operands are split along what it sums over leaves a partial sum on each of n
    ranks, which an all_reduce or a reduce_scatter adds up. With `in_steps` it works in n steps, as
    products with inputs that they gather themselves do: the sum begins behind the first step and
    runs beside the others. So do XLA ("collective matmul") and Transformer Engine
    (`tp_comm_overlap`). A blocking sum (`stg.blocking`) waits for the product. An approximation:
    all of the sum runs beside the last n-1 steps, and the kernels of the steps take what their
    parts of one take.
    """

    name, record = "stg.tp_outputs", TpOutputsRule
    section = Section.TENSOR
    example = "stg.tp_outputs[in_steps]"
