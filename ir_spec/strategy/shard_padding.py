"""How ZeRO shards parameters that do not divide evenly among the ranks."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Problems
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

PADDINGS = ("none", "dim0", "flat")


class ShardPaddingRule(Record):
    """The padding of parameters that do not divide evenly among the ranks."""

    rule: str = flagged(
        "shard_padding",
        "ZeRO: parameters that the ranks do not divide stay whole (none), or are padded to equal "
        "shards: along the first dimension of PyTorch's weight, its outputs (dim0), or over all "
        "elements (flat).",
        choices=PADDINGS,
        rare=True,
        software=True,
    )


class ShardPaddingOp(Statement):
    """How ZeRO shards parameters, gradients and optimizer state that do not divide evenly among the
    ranks. All shards have the size of the first one; padding is zeros that nothing uses. At stages
    1 and 2, each rank has the whole padded parameter, and its users read a view, as in the flat
    buffers of DeepSpeed (runtime/zero/stage_1_and_2.py: `flatten_dense_tensors_aligned`), which pad
    the end of a group instead of each parameter.

    `dim0`: a shard is ceil(rows / ranks) rows of the weight, whose rows are its outputs (all heads
    of queries, the inner width, the vocabulary), as in `fully_shard` with `Shard(0)`
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py: `padded_sharded_size`). `flat`: a shard is
    ceil(elements / ranks) elements, as in flat parameters of DeepSpeed
    (runtime/zero/partition_parameters.py: `_padding_size`) and FSDP, and in Megatron's buffers
    (core/distributed/param_and_grad_buffer.py: `_pad_end_of_bucket_if_needed`), which pad the end
    of a bucket instead of each parameter. In a parameter that tensor parallelism splits, the
    longest run of its other dimensions is padded. `none`: a parameter of which no dimension divides
    stays whole, which is an error if these are more than 1% of all parameters.

    The plan has the optimizer state of the first rank; the last ranks, whose shards are smaller in
    PyTorch, have up to one row or element less, or nothing.
    """

    name, record = "stg.shard_padding", ShardPaddingRule
    section = Section.DATA
    training = "parameters stay where they are while serving"
    example = "stg.shard_padding[rule = dim0]"

    def problems(self, request: FlagValues) -> Problems:
        rule = request["shard_padding"]
        if not request["zero"] and rule != "none":
            message = f"--shard-padding {rule} needs parameters that ZeRO shards, found --zero 0"
            yield message, "choose --zero 1, 2 or 3, or leave it out"
