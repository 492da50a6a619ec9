"""The built-in passes, ops and pipelines, registered as a plug-in like those of third parties."""

from __future__ import annotations

from stagec.api import Plugin
from stagec.ir_spec.builtin import BUILTIN
from stagec.passes.autodiff.add_optimizer import AddOptimizer
from stagec.passes.autodiff.differentiate import Differentiate
from stagec.passes.cleanup.canonicalize import Canonicalize
from stagec.passes.cleanup.eliminate_common_subexpressions import EliminateCommonSubexpressions
from stagec.passes.cleanup.eliminate_dead_code import EliminateDeadCode
from stagec.passes.cleanup.verify import Verify
from stagec.passes.lower.emit import Emit
from stagec.passes.lower.fuse_kernels import FuseKernels
from stagec.passes.lower.lower_to_trace import LowerToTrace
from stagec.passes.memory.offload_to_host import OffloadToHost
from stagec.passes.memory.place_buffers import PlaceBuffers
from stagec.passes.memory.plan_memory import PlanMemory
from stagec.passes.partition.coalesce_collectives import CoalesceCollectives
from stagec.passes.partition.copy_gradients import CopyGradients
from stagec.passes.partition.hoist_reductions import HoistReductions
from stagec.passes.partition.hold_inputs import HoldInputs
from stagec.passes.partition.insert_collectives import InsertCollectives
from stagec.passes.partition.keep_gathered_parameters import KeepGatheredParameters
from stagec.passes.partition.keep_inputs import KeepInputs
from stagec.passes.partition.keep_locals import KeepLocals
from stagec.passes.partition.narrow_collectives import NarrowCollectives
from stagec.passes.partition.propagate_sharding import PropagateSharding
from stagec.passes.partition.record_expert_rows import RecordExpertRows
from stagec.passes.partition.reorder_elements import ReorderElements
from stagec.passes.partition.reshard_parameters import ReshardParameters
from stagec.passes.partition.shard_units import ShardUnits
from stagec.passes.partition.sort_expert_rows import SortExpertRows
from stagec.passes.partition.whole_gradients import WholeGradients
from stagec.passes.parts.connect_parts import ConnectParts
from stagec.passes.parts.cut_part import CutPart
from stagec.passes.parts.run_ahead import RunAhead
from stagec.passes.pipeline_stages.gather_parameters_once import GatherParametersOnce
from stagec.passes.pipeline_stages.keep_stage_values import KeepStageValues
from stagec.passes.pipeline_stages.retain_graphs import RetainGraphs
from stagec.passes.pipeline_stages.split_stages import SplitStages
from stagec.passes.pipeline_stages.split_weight_gradients import SplitWeightGradients
from stagec.passes.serving.absorb_latent import AbsorbLatent
from stagec.passes.serving.copy_experts import CopyExperts
from stagec.passes.serving.draft_ahead import DraftAhead
from stagec.passes.serving.draft_tokens import DraftTokens
from stagec.passes.serving.gather_logits import GatherLogits
from stagec.passes.serving.hand_over import HandOver
from stagec.passes.serving.quantize_weights import QuantizeWeights
from stagec.passes.serving.sample_tokens import SampleTokens
from stagec.passes.serving.share_ranks import ShareRanks
from stagec.passes.serving.to_serving import ToServing
from stagec.passes.serving.verify_drafts import VerifyDrafts
from stagec.passes.shapes.bind import Bind
from stagec.passes.shapes.infer_shapes import InferShapes
from stagec.passes.shapes.inline import Inline
from stagec.passes.strategy.add_dropout import AddDropout
from stagec.passes.strategy.add_lora import AddLora
from stagec.passes.strategy.autocast import Autocast
from stagec.passes.strategy.choose_recompute import ChooseRecompute
from stagec.passes.strategy.exchange_dimensions import ExchangeDimensions
from stagec.passes.strategy.expand_attention import ExpandAttention
from stagec.passes.strategy.expand_kernels import ExpandKernels
from stagec.passes.strategy.expand_loss import ExpandLoss
from stagec.passes.strategy.freeze_parameters import FreezeParameters
from stagec.passes.strategy.fuse_attention import FuseAttention
from stagec.passes.strategy.gather_dimensions import GatherDimensions
from stagec.passes.strategy.insert_fp8_casts import InsertFp8Casts
from stagec.passes.strategy.normalize_strategy import NormalizeStrategy
from stagec.passes.strategy.overlap_batches import OverlapBatches
from stagec.passes.strategy.pad_dimensions import PadDimensions
from stagec.passes.strategy.pad_vocabulary import PadVocabulary
from stagec.passes.strategy.place_values import PlaceValues
from stagec.passes.strategy.ring_attention import RingAttention
from stagec.passes.strategy.separate_attention import SeparateAttention
from stagec.passes.strategy.serve_lora import ServeLora
from stagec.passes.strategy.set_element_types import SetElementTypes
from stagec.passes.strategy.shard_parameters import ShardParameters
from stagec.passes.strategy.size_experts import SizeExperts
from stagec.passes.strategy.split_microbatches import SplitMicrobatches

PLUGIN = Plugin(
    name="builtin",
    passes=(
        Inline,
        InferShapes,
        CutPart,
        ToServing,
        AbsorbLatent,
        DraftTokens,
        VerifyDrafts,
        DraftAhead,
        SampleTokens,
        GatherLogits,
        PadVocabulary,
        PadDimensions,
        NormalizeStrategy,
        AddLora,
        ServeLora,
        FreezeParameters,
        AddDropout,
        SetElementTypes,
        FuseAttention,
        ExpandKernels,
        ExpandAttention,
        ExpandLoss,
        Autocast,
        InsertFp8Casts,
        CopyExperts,
        QuantizeWeights,
        SizeExperts,
        OverlapBatches,
        SeparateAttention,
        ChooseRecompute,
        SplitMicrobatches,
        PlaceValues,
        ShardParameters,
        GatherDimensions,
        ExchangeDimensions,
        RingAttention,
        Differentiate,
        AddOptimizer,
        RunAhead,
        PropagateSharding,
        WholeGradients,
        InsertCollectives,
        HoistReductions,
        NarrowCollectives,
        SortExpertRows,
        KeepGatheredParameters,
        ShardUnits,
        RecordExpertRows,
        SplitWeightGradients,
        SplitStages,
        GatherParametersOnce,
        RetainGraphs,
        KeepStageValues,
        CoalesceCollectives,
        ReshardParameters,
        CopyGradients,
        ReorderElements,
        KeepInputs,
        KeepLocals,
        HoldInputs,
        HandOver,
        ConnectParts,
        ShareRanks,
        OffloadToHost,
        PlanMemory,
        PlaceBuffers,
        FuseKernels,
        LowerToTrace,
        Emit,
        Bind,
        Canonicalize,
        EliminateCommonSubexpressions,
        EliminateDeadCode,
        Verify,
    ),
    ops=BUILTIN,
    pipelines={
        "apply-strategy": "pad-vocabulary,pad-dimensions,normalize-strategy,copy-experts,add-lora,"
        "serve-lora,freeze-parameters,add-dropout,set-element-types,fuse-attention,expand-kernels,expand-attention,expand-loss,autocast,"
        "quantize-weights,insert-fp8-casts,size-experts,overlap-batches,separate-attention,choose-recompute,split-microbatches,"
        "place-values,"
        "shard-parameters,gather-dimensions,exchange-dimensions,ring-attention",
        "partition": "propagate-sharding,whole-gradients,insert-collectives,"
        "hoist-reductions,narrow-collectives,"
        "sort-expert-rows,"
        "shard-units,keep-gathered-parameters,record-expert-rows",
        "stages": "split-weight-gradients,split-stages,gather-parameters-once,retain-graphs,"
        "keep-stage-values",
        "units": "coalesce-collectives,reshard-parameters,copy-gradients,reorder-elements,"
        "keep-inputs,keep-locals,hold-inputs,eliminate-dead-code",
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
