"""The built-in passes, ops and pipelines, registered as a plug-in like those of third parties."""

from collections.abc import Iterator
from importlib import import_module

from stagec.api import Pass, Plugin
from stagec.ir_spec.builtin import BUILTIN

#: The modules of passes by folder, in the order in which passes are listed.
_MODULES = """
    shapes: inline infer_shapes
    parts: cut_part
    serving: to_serving absorb_latent draft_tokens verify_drafts draft_ahead sample_tokens
        gather_logits
    strategy: pad_vocabulary pad_dimensions normalize_strategy add_dropout add_lora serve_lora
        freeze_parameters set_element_types fuse_attention expand_kernels
        weigh_activations order_shared_experts expand_attention expand_loss autocast
        insert_fp8_casts
    serving: copy_experts quantize_weights
    strategy: size_experts overlap_batches separate_attention choose_recompute
        split_microbatches place_values shard_parameters gather_dimensions exchange_dimensions
        ring_attention
    autodiff: differentiate add_optimizer
    parts: run_ahead
    partition: propagate_sharding whole_gradients insert_collectives hoist_reductions
        narrow_collectives sort_expert_rows keep_gathered_parameters shard_units
        record_expert_rows
    pipeline_stages: split_weight_gradients split_stages gather_parameters_once retain_graphs
        keep_stage_values
    partition: coalesce_collectives reshard_parameters copy_gradients reorder_elements
        keep_reductions keep_inputs keep_expert_rows keep_locals hold_inputs hold_stand_ins
        hold_flat_buffer hold_head_input
    serving: hand_over
    parts: connect_parts
    serving: share_ranks
    memory: offload_to_host plan_memory place_buffers
    lower: fuse_kernels lower_to_trace emit
    shapes: bind
    cleanup: canonicalize eliminate_common_subexpressions eliminate_dead_code verify
"""


def _passes() -> Iterator[type[Pass]]:
    """The pass that each module defines."""
    folder = ""
    for word in _MODULES.split():
        if word.endswith(":"):
            folder = word.removesuffix(":")
            continue
        module = import_module(f"{__name__}.{folder}.{word}")
        classes = (item for item in vars(module).values() if isinstance(item, type))
        own = (item for item in classes if item.__module__ == module.__name__)
        yield next(item for item in own if issubclass(item, Pass))


PLUGIN = Plugin(
    name="builtin",
    passes=tuple(_passes()),
    ops=BUILTIN,
    pipelines={
        "apply-strategy": "pad-vocabulary,pad-dimensions,normalize-strategy,copy-experts,"
        "add-dropout,add-lora,serve-lora,freeze-parameters,set-element-types,fuse-attention,"
        "expand-kernels,weigh-activations,order-shared-experts,expand-attention,expand-loss,"
        "quantize-weights,autocast,insert-fp8-casts,size-experts,overlap-batches,"
        "separate-attention,choose-recompute,split-microbatches,place-values,"
        "shard-parameters,gather-dimensions,exchange-dimensions,ring-attention",
        "partition": "propagate-sharding,whole-gradients,insert-collectives,hoist-reductions,"
        "narrow-collectives,sort-expert-rows,shard-units,keep-gathered-parameters,"
        "record-expert-rows",
        "stages": "split-weight-gradients,split-stages,gather-parameters-once,retain-graphs,"
        "keep-stage-values",
        "units": "coalesce-collectives,reshard-parameters,copy-gradients,reorder-elements,"
        "keep-reductions,keep-inputs,keep-expert-rows,keep-locals,hold-inputs,hold-stand-ins,hold-flat-buffer,"
        "hold-head-input,eliminate-dead-code",
        "plan": "offload-to-host,plan-memory",
        "place": "inline,infer-shapes,partition",
        "train": "inline,infer-shapes,apply-strategy,gather-logits,differentiate,add-optimizer,"
        "eliminate-dead-code,partition,stages,units,plan,fuse-kernels,lower-to-trace",
        "forward": "inline,infer-shapes,apply-strategy,gather-logits,partition,stages,units,plan,"
        "fuse-kernels,lower-to-trace",
        "serve": "inline,infer-shapes,pad-vocabulary,to-serving,absorb-latent,sample-tokens,"
        "serve-step",
        "serve-step": "apply-strategy,gather-logits,partition,stages,units,plan,fuse-kernels,"
        "lower-to-trace",
        "clean": "canonicalize,eliminate-common-subexpressions,eliminate-dead-code",
    },
)
