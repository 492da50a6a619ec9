"""Whether inputs of split products are kept for backward, and whether products overlap with their
gathers."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
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
    head: str = flagged(
        "tp_head_input",
        "What the head gathers is a new tensor, or in a buffer that stays across steps.",
        choices=("tensor", "buffer"),
        software=True,
    )


class TpInputsOp(Statement):
    """Whether backward gathers the inputs of split matmuls again (regather) or keeps them
    (save-gathered), and whether products wait for them.

    With `gathers = in_steps`, products of a value that is gathered over n ranks run in n steps,
    including the ops that are fused with them: n-1 steps during the gather, on the parts that have
    arrived, and the last one after it. This is what XLA ("collective matmul", arXiv 2105.04663,
    section 4), Transformer Engine (`ub_overlap_ag`, one product of queries, keys and values) and
    PyTorch (`fused_all_gather_matmul`, with a list of weights) do. A product with an operand that
    is computed after the first of them waits for the whole value. It mirrors
    `stg.tp_outputs[in_steps]`, and is the same kind of approximation.

    `until = module`: an eager module keeps its input until it returns, after the sum of its output,
    even if a checkpoint saves nothing in it (arguments of `Attention.forward` and
    `FeedForward.forward` are names in Python frames).

    `head = buffer`: the head gathers its input, in forward and in backward, into one buffer that
    exists for the whole job (`hold-head-input`; Megatron-Core, core/tensor_parallel/layers.py,
    `get_global_memory_buffer`, of which layers of Transformer Engine make no use).
    """

    name, record = "stg.tp_inputs", TpInputsRule
    rare, needs = True, ("tp", "sp")
    example = "stg.tp_inputs[regather]"

    def from_flags(self, request: FlagValues) -> Statements:
        if "tp" in request.axes:
            yield {"policy": "regather", **self.flag_values(request)}
