"""The built-in passes, ops and pipelines; they come in by the same door as those of others."""

from __future__ import annotations

from stagec.api import Plugin
from stagec.ir_spec.ops import BUILTIN
from stagec.passes.add_optimizer import AddOptimizer
from stagec.passes.apply_strategy import ApplyStrategy
from stagec.passes.bind import Bind
from stagec.passes.canonicalize import Canonicalize
from stagec.passes.coalesce_collectives import CoalesceCollectives
from stagec.passes.differentiate import Differentiate
from stagec.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from stagec.passes.eliminate_dead_code import EliminateDeadCode
from stagec.passes.emit_chakra import EmitChakra
from stagec.passes.infer_shapes import InferShapes
from stagec.passes.insert_collectives import InsertCollectives
from stagec.passes.lower_to_trace import LowerToTrace
from stagec.passes.plan_memory import PlanMemory
from stagec.passes.propagate_sharding import PropagateSharding
from stagec.passes.split_stages import SplitStages
from stagec.passes.verify import Verify

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
        EmitChakra,
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
