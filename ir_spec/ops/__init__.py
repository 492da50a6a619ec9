"""The built-in ops, one class each; `BUILTIN` lists them."""

from __future__ import annotations

from stagec.ir.opdef import OpDef
from stagec.ir_spec.ops import (
    attention,
    comm,
    layout,
    norm,
    optimizer,
    pointwise,
    strategy,
    structure,
    trace,
    vocabulary,
)

BUILTIN: tuple[OpDef, ...] = (
    *structure.OPS,
    *strategy.OPS,
    *pointwise.OPS,
    *norm.OPS,
    *attention.OPS,
    *vocabulary.OPS,
    *layout.OPS,
    *comm.OPS,
    *optimizer.OPS,
    *trace.OPS,
)
