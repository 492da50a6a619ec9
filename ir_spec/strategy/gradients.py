"""How long gradients are alive, and of which rows of tables."""

from typing import Any

from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged, parameter

LIFETIMES = ("persistent", "freed", "updated")
STAGED = "staged"
REDUCED = ("each", "once", STAGED)
COLLECTIVES = ("reduce_scatter", "all_reduce")
SUMS = ("direct", "cast")


class GradientsRule(Record):
    """How long gradients are alive, and of which rows of tables."""

    lifetime: str = flagged(
        "grads",
        "Gradient buffers persist across steps, are freed before forward, or by their update "
        "(updated).",
        choices=LIFETIMES,
    )
    tables: str = flagged(
        "grad_tables",
        "Gradients of split embedding tables: split, or of all rows on each rank (whole).",
        choices=("split", "whole"),
        needs=("tp",),
    )
    reduced: str = flagged(
        "grad_reduction",
        "Under ZeRO-2 and 3 gradients are reduced in each microbatch, once behind the last one, or "
        "once in a pipeline only (staged).",
        doc=(
            "of ZeRO-2 and 3: in each microbatch (each); once, behind the last one; once in a "
            "pipeline (staged)"
        ),
        choices=REDUCED,
        metavar="each|once|staged",
        needs=("zero",),
    )
    sums: str = flagged(
        "grad_sums",
        "A gradient is added to the sum of microbatches as it is (direct), or cast to the type of "
        "the sum before, by a kernel of its own (cast).",
        choices=SUMS,
    )
    stand_ins: str = parameter(
        "name",
        "with stg.fusion[gradients], what autograd takes in place of a gradient of a block: a new "
        "tensor (made), or one for each weight that stays across steps (kept)",
        choices=("made", "kept"),
    )
    flat: int = flagged(
        "grad_flat",
        "Copy gradients that ZeRO reduces into a buffer of N elements (0: none), as "
        "reduce_bucket_size of DeepSpeed.",
        kind="int",
        default=0,
        least=0,
        metavar="N",
        needs=("zero",),
    )
    flat_buffers: int = flagged(
        "grad_flat_buffers",
        "How many such buffers there are: 2 with overlap_comm of DeepSpeed.",
        kind="int",
        default=1,
        least=1,
        most=2,
        metavar="1|2",
        needs=("zero", "grad_flat"),
    )
    collective: str = flagged(
        "grad_collective",
        "Under ZeRO-1 ranks reduce the part of the gradients that they update (reduce-scatter), or "
        "all of them (all-reduce).",
        choices=COLLECTIVES,
        needs=("zero",),
    )


class GradientsOp(Statement):
    """The lifetime of gradients: in persistent buffers, as in Megatron-LM, or from backward to the
    end of the step (`freed`), so that none exist in forward, as with `zero_grad(set_to_none=True)`
    of PyTorch. `updated`: the update frees them (deepspeed/runtime/zero/stage_1_and_2.py: `step`,
    `free_grad_in_param_list`, `averaged_gradients[i] = None`). Under ZeRO-3 they then persist, as
    parts of one buffer (stage3.py: `__param_id_to_grad_partition`).

    Sums over several microbatches exist from the first backward on, also during the forward of the
    next microbatch: they count as persistent. In a pipeline, the memory plan has them from the
    first microbatch of a stage on, since `AccumulateGrad` uses the first gradient as the sum; a
    later gradient is a separate tensor, which is added.

    `tables = whole`: for an embedding table whose rows are split, a rank computes the gradient of
    all rows (a partial sum if ranks have different tokens), as in DTensor, which has no rule for
    parts of the rows (torch/distributed/tensor/_ops/_embedding_ops.py:
    `embedding_dense_backward_strategy`). FSDP2 reduces it when the backward of its unit ends
    (_fully_shard/_fsdp_param.py: `_get_grad_inner_tensor`), an optimizer in its update.

    `reduced = once`: under ZeRO-2 and 3, a rank adds up whole gradients over the microbatches, in
    the type in which they are reduced, and reduces them once, layer by layer, as FSDP2 does without
    `set_requires_gradient_sync` (_fully_shard/_fsdp_param_group.py: `post_backward`;
    _fsdp_param.py: `to_accumulated_grad_if_needed`), for example with `no_sync` of accelerate, and
    in a pipeline (`staged`) with `PipelineStage` (torch/distributed/pipelining/stage.py:
    `backward_maybe_with_nosync`, `perform_reduce_grad`).

    `sums = cast`: if the sum over microbatches has another type, one kernel casts the gradient and
    another adds the result: 18 bytes per parameter for bf16 and fp32, not 10 (DeepSpeed,
    runtime/bf16_optimizer.py: `update_hp_grads`).

    `stand_ins = kept`: Transformer Engine keeps a tensor of the shape of each weight, which blocks
    share (transformer_engine/pytorch/module/base.py: `get_dummy_wgrad`); without, the product
    returns a new one (megatron/core/tensor_parallel/layers.py:
    `LinearWithGradAccumulationAndAsyncCommunication.backward`).

    `flat`: elements of the buffer of contiguous gradients (deepspeed/runtime/zero/stage_1_and_2.py:
    `setup_buckets`, `allreduce_bucket`; stage3.py: `__ipg_bucket_flat_buffer`), which the pass
    `hold-flat-buffer` adds. There are no flat buffers of DDP then. With `flat_buffers = 2` one is
    filled while the other is reduced (`overlap_comm`), of which ZeRO-1 then makes copies as well.

    `collective = all_reduce`: under ZeRO-1, each rank receives the sums of all gradients and uses
    the part that it updates, in twice the time of a reduce_scatter (nanotron, trainer.py:
    `train_step`, `reduce_scatter=False`; DeepSpeed in bf16, runtime/pipe/engine.py:
    `_bf16_reduce_grads`). Parameters that are gathered during the next forward keep the
    reduce_scatter.
    """

    name, record = "stg.gradients", GradientsRule
    section = Section.MEMORY
    rare, software = True, True
    training = "there are no gradients"
    example = "stg.gradients[lifetime = freed]"

    def flag_values(self, request: FlagValues) -> dict[str, Any]:
        values = super().flag_values(request)
        if not request["zero"]:
            for name in ("reduced", "collective", "flat", "flat_buffers"):
                values.pop(name, None)
        return values
