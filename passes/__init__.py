"""The built-in passes, ops and pipelines; they come in by the same door as those of others."""

from __future__ import annotations

from stagec.api import Plugin
from stagec.ir_spec.ops import BUILTIN
from stagec.passes.bind import Bind
from stagec.passes.canonicalize import Canonicalize
from stagec.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from stagec.passes.eliminate_dead_code import EliminateDeadCode
from stagec.passes.infer_shapes import InferShapes
from stagec.passes.insert_collectives import InsertCollectives
from stagec.passes.propagate_sharding import PropagateSharding
from stagec.passes.verify import Verify

PLUGIN = Plugin(
    name="builtin",
    passes=(
        InferShapes,
        PropagateSharding,
        InsertCollectives,
        Bind,
        Canonicalize,
        EliminateCommonSubexpressions,
        EliminateDeadCode,
        Verify,
    ),
    ops=BUILTIN,
    pipelines={
        "place": "infer-shapes,propagate-sharding,insert-collectives",
        "clean": "canonicalize,eliminate-common-subexpressions,eliminate-dead-code",
    },
)
