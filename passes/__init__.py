"""The built-in passes, ops and pipelines; they come in by the same door as those of others."""

from __future__ import annotations

from stagec.api import Plugin
from stagec.ir_spec.ops import BUILTIN
from stagec.passes.autodiff.add_optimizer import AddOptimizer
from stagec.passes.autodiff.differentiate import Differentiate
from stagec.passes.cleanup.canonicalize import Canonicalize
from stagec.passes.cleanup.eliminate_common_subexpressions import EliminateCommonSubexpressions
from stagec.passes.cleanup.eliminate_dead_code import EliminateDeadCode
from stagec.passes.cleanup.verify import Verify
from stagec.passes.lower.emit import Emit
from stagec.passes.lower.lower_to_trace import LowerToTrace
from stagec.passes.memory.plan_memory import PlanMemory
from stagec.passes.partition.coalesce_collectives import CoalesceCollectives
from stagec.passes.partition.insert_collectives import InsertCollectives
from stagec.passes.partition.propagate_sharding import PropagateSharding
from stagec.passes.pipeline_stages.split_stages import SplitStages
from stagec.passes.shapes.bind import Bind
from stagec.passes.shapes.infer_shapes import InferShapes
from stagec.passes.strategy.apply_strategy import ApplyStrategy

PLUGIN = Plugin(
    name="builtin",
    passes=(
        InferShapes,
        ApplyStrategy,
        Differentiate,
        AddOptimizer,
        PropagateSharding,
        InsertCollectives,
        SplitStages,
        CoalesceCollectives,
        PlanMemory,
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
        "place": "infer-shapes,propagate-sharding,insert-collectives",
        "train": "infer-shapes,apply-strategy,differentiate,add-optimizer,eliminate-dead-code,"
        "propagate-sharding,insert-collectives,split-stages,coalesce-collectives,"
        "eliminate-dead-code,plan-memory,lower-to-trace",
        "forward": "infer-shapes,apply-strategy,propagate-sharding,insert-collectives,"
        "split-stages,coalesce-collectives,eliminate-dead-code,plan-memory,lower-to-trace",
        "clean": "canonicalize,eliminate-common-subexpressions,eliminate-dead-code",
    },
)
