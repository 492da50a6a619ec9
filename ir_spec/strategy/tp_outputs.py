"""Whether sums of split products begin before the product ends."""

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

    A product whose operands are split along its contracted dimension leaves a partial sum on each
    of n ranks, which an all_reduce or a reduce_scatter adds up. With `in_steps` it runs in n steps,
    like products that gather their inputs themselves: the sum begins after the first step and
    overlaps with the others. This is what XLA ("collective matmul") and Transformer Engine
    (`tp_comm_overlap`) do. A blocking sum (`stg.blocking`) waits for the product. It is an
    approximation: the whole sum overlaps with the last n-1 steps, and the kernel of a step takes
    1/n of the time of the whole kernel.
    """

    name, record = "stg.tp_outputs", TpOutputsRule
    section = Section.TENSOR
    example = "stg.tp_outputs[in_steps]"
