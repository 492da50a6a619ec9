"""The statements of a strategy: how a model is split over a mesh and how it runs, without touching
its text. A file each; `STATEMENTS` lists them."""

from __future__ import annotations

from stagec.ir_spec.strategy.adapters import AdaptersOp
from stagec.ir_spec.strategy.autocast import AutocastOp
from stagec.ir_spec.strategy.blocking import BlockingOp
from stagec.ir_spec.strategy.bucket import BucketOp
from stagec.ir_spec.strategy.capacity import CapacityOp
from stagec.ir_spec.strategy.collectives import CollectivesOp
from stagec.ir_spec.strategy.defer import DeferOp
from stagec.ir_spec.strategy.dtypes import DtypesOp
from stagec.ir_spec.strategy.exchange import ExchangeOp
from stagec.ir_spec.strategy.expert_load import ExpertLoadOp
from stagec.ir_spec.strategy.freeze import FreezeOp
from stagec.ir_spec.strategy.fusion import FusionOp
from stagec.ir_spec.strategy.gather import GatherOp
from stagec.ir_spec.strategy.gradients import GradientsOp
from stagec.ir_spec.strategy.hosts import HostsOp
from stagec.ir_spec.strategy.inputs import InputsOp
from stagec.ir_spec.strategy.kernels import KernelsOp
from stagec.ir_spec.strategy.lora import LoraOp
from stagec.ir_spec.strategy.loss import LossOp
from stagec.ir_spec.strategy.microbatches import MicrobatchesOp
from stagec.ir_spec.strategy.moe import MoeOp
from stagec.ir_spec.strategy.offload import OffloadOp
from stagec.ir_spec.strategy.optimizer import OptimizerOp
from stagec.ir_spec.strategy.pad_dimensions import PadDimensionsOp
from stagec.ir_spec.strategy.pad_vocabulary import PadVocabularyOp
from stagec.ir_spec.strategy.part import PartOp
from stagec.ir_spec.strategy.pipeline import PipelineOp
from stagec.ir_spec.strategy.recompute import RecomputeOp
from stagec.ir_spec.strategy.redundant_experts import CopiesOp
from stagec.ir_spec.strategy.ring import RingOp
from stagec.ir_spec.strategy.routing import RoutingOp
from stagec.ir_spec.strategy.saved_tensors import SavedTensorsOp
from stagec.ir_spec.strategy.scheduler import SchedulerOp
from stagec.ir_spec.strategy.selective import SelectiveOp
from stagec.ir_spec.strategy.shard_padding import ShardPaddingOp
from stagec.ir_spec.strategy.shard_params import ShardParamsOp
from stagec.ir_spec.strategy.shard_units import ShardUnitsOp
from stagec.ir_spec.strategy.split import SplitOp
from stagec.ir_spec.strategy.stage_buffers import StageBuffersOp
from stagec.ir_spec.strategy.statement import Statement
from stagec.ir_spec.strategy.sustained import SustainedOp
from stagec.ir_spec.strategy.tp_inputs import TpInputsOp
from stagec.ir_spec.strategy.tp_outputs import TpOutputsOp
from stagec.ir_spec.strategy.weights import WeightsOp

#: In the order in which flags write them.
STATEMENTS: tuple[Statement, ...] = (
    SplitOp(),
    DeferOp(),
    ExchangeOp(),
    RingOp(),
    ShardParamsOp(),
    ShardUnitsOp(),
    ShardPaddingOp(),
    MicrobatchesOp(),
    PipelineOp(),
    GatherOp(),
    TpInputsOp(),
    TpOutputsOp(),
    BlockingOp(),
    FusionOp(),
    CapacityOp(),
    ExpertLoadOp(),
    RoutingOp(),
    DtypesOp(),
    AutocastOp(),
    BucketOp(),
    RecomputeOp(),
    SelectiveOp(),
    OffloadOp(),
    OptimizerOp(),
    GradientsOp(),
    InputsOp(),
    SavedTensorsOp(),
    StageBuffersOp(),
    LossOp(),
    KernelsOp(),
    HostsOp(),
    SchedulerOp(),
    SustainedOp(),
    CollectivesOp(),
    MoeOp(),
    CopiesOp(),
    WeightsOp(),
    LoraOp(),
    AdaptersOp(),
    FreezeOp(),
    PadVocabularyOp(),
    PadDimensionsOp(),
    PartOp(),
)
