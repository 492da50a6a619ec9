"""Whether inputs of split products are kept for backward, and begin before they are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.statement import Record, Statement, flagged


class TpInputsRule(Record):
    """Whether backward gathers the inputs of split matmuls again, and products wait for them."""

    policy: str = flagged(
        "tp_inputs",
        "Gather inputs of split products again in backward, or save them.",
        required=True,
        positional=True,
        choices=("regather", "save_gathered"),
        tries=("save-gathered", "regather"),
    )
    gathers: str = flagged(
        "tp_gathers",
        "Split products wait for the gather of their input (whole), or overlap with it (in-steps).",
        choices=("whole", "in_steps"),
    )
    until: str = flagged(
        "tp_inputs_until",
        "Free gathered inputs after the last product that reads them, or when the module of these "
        "products returns.",
        choices=("product", "module"),
        software=True,
    )


class TpInputsOp(Statement):
    """Whether backward gathers the inputs of split matmuls again (regather) or keeps them
    (save-gathered), and whether products wait for them.

    With `gathers = in_steps` the products that take a value which is gathered over n ranks work in
    n steps, with what runs in their kernels: n-1 of them beside the gather, on the parts that are
    there, the last one behind it. So do XLA ("collective matmul", arXiv 2105.04663, section 4),
    Transformer Engine (`ub_overlap_ag`, one product of queries, keys and values) and PyTorch
    (`fused_all_gather_matmul`, with a list of weights). A product of something that is made behind
    the first of them waits for all of the value. It is the mirror image of
    `stg.tp_outputs[in_steps]`, and an approximation in the same way.

    `until = module`: an eager module has its input until it returns, behind the sum of its output,
    also where a checkpoint saves nothing in it (arguments of `Attention.forward` and
    `FeedForward.forward` are names of Python frames).
    """

    name, record = "stg.tp_inputs", TpInputsRule
    rare, needs = True, ("tp", "sp")
    example = "stg.tp_inputs[regather]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "tp" in request.axes:
            yield {"policy": "regather", **self.flag_values(request)}
