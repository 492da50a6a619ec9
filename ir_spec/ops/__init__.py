"""The built-in ops, one class each; `BUILTIN` lists them."""

from __future__ import annotations

from stagec.ir.opdef import OpDef
from stagec.ir_spec.ops import (
    activation,
    attention,
    comm,
    contraction,
    extremes,
    functions,
    layout,
    moe,
    norm,
    optimizer,
    pipeline,
    policies,
    ring,
    scan,
    space,
    strategy,
    structure,
    trace,
    vocabulary,
)

BUILTIN: tuple[OpDef, ...] = (
    *structure.OPS,
    *functions.OPS,
    *strategy.OPS,
    *policies.OPS,
    *space.OPS,
    *contraction.OPS,
    *extremes.OPS,
    *scan.OPS,
    *activation.OPS,
    *norm.OPS,
    *attention.OPS,
    *ring.OPS,
    *moe.OPS,
    *vocabulary.OPS,
    *layout.OPS,
    *comm.OPS,
    *optimizer.OPS,
    *pipeline.OPS,
    *trace.OPS,
)
