"""The units in which ZeRO-3 gathers parameters outside of blocks, and how long they are kept."""

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

OUTER = ("root", "ends")
LOSS = ("outside", "inside")


class ShardUnitsRule(Record):
    """The units in which ZeRO-3 gathers parameters outside of blocks, how long they are kept, and
    the buffers of calls."""

    outer: str = flagged(
        "shard_units",
        "ZeRO-3: parameters outside the blocks are one unit, gathered from forward to the end of "
        "backward (root), or two (ends): the unit before the blocks is freed after forward and "
        "gathered again for its backward.",
        choices=OUTER,
        only=("zero", 3),
    )
    loss: str = flagged(
        "shard_loss",
        "ZeRO-3: the loss is inside the sharded module, so the gather of the last block lasts "
        "until the loss, and backward begins with gathering it again (inside), or after the module "
        "(outside).",
        choices=LOSS,
        only=("zero", 3),
    )
    copies: bool = flagged(
        "shard_copies",
        "ZeRO-3: copy the gradients of a unit into a buffer to reduce, and what forward gathers "
        "out of one; each stays until that of the next unit exists, as in FSDP2.",
        software=True,
        only=("zero", 3),
    )
    reuse: int = flagged(
        "shard_reuse",
        "ZeRO-3: keep parameters of the last blocks that backward uses before N elements of others "
        "have been used (0: none), as stage3_max_reuse_distance of DeepSpeed.",
        "int",
        default=0,
        least=0,
        metavar="N",
        only=("zero", 3),
    )


class ShardUnitsOp(Statement):
    """With ZeRO-3: the calls of `fully_shard` in addition to those of the blocks, each of which is
    a unit.

    `outer = root`: all other parameters belong to the outermost module, and are gathered before
    forward and freed after backward. `ends`: the parameters that are used before the blocks are a
    unit, which is freed after its use and gathered again before its backward; those that are used
    after the blocks are another unit, which is kept from forward to backward, as with
    `fully_shard(tok_embeddings)` and `fully_shard([norm, output])` of torchtitan.

    `copies`: the gradients of a unit wait for each other, and are copied and cast into the buffer
    that one call reduces, which is kept until that of the next unit exists (`foreach_reduce`).
    Parameters that forward gathers are copied out of the buffer of the call, which is kept until
    the next unit has been copied out (`FSDPParamGroup.wait_for_unshard`), so the next unit is not
    gathered early.

    `reuse`: with `reshard = always`, gathered parameters of a block stay if fewer elements of
    others are used between forward and backward of the block, twice those of the blocks behind it
    (deepspeed/runtime/zero/partitioned_param_coordinator.py: `__params_to_release`). Parameters
    outside of blocks are not counted.

    `loss = inside`: the module computes the loss. FSDP2 frees the last of these buffers when the
    forward of the root ends (`FSDPState._post_forward`) and prefetches the last block when the
    backward of its output begins (`FSDPParamGroup.pre_backward`), so both exist during the loss.
    With `outer = ends` the output is that of the head, whose backward is behind the loss. These are
    the units of accelerate 1.15 (utils/fsdp_utils.py: fsdp2_prepare_model).
    """

    name, record = "stg.shard_units", ShardUnitsRule
    section = Section.DATA
    rare = True
    training = "parameters stay where they are while serving"
    example = "stg.shard_units[outer = ends]"
