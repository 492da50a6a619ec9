"""The built-in ops, one class each; `BUILTIN` lists them."""

from __future__ import annotations

from stagec.ir.opdef import OpDef
from stagec.ir_spec.ops import (
    activation,
    adapters,
    attention,
    causal_conv,
    comm,
    contraction,
    convolution,
    extremes,
    functions,
    gated,
    indexer,
    layout,
    linear_attention,
    losses,
    moe,
    norm,
    optimizer,
    pipeline,
    policies,
    recommend,
    ring,
    rope,
    rwkv,
    scan,
<<<<<<< HEAD
    scan_base,
    selection,
    state_space,
=======
    space,
>>>>>>> wt-search
    strategy,
    structure,
    token_shift,
    trace,
    vocabulary,
)

BUILTIN: tuple[OpDef, ...] = (
    *structure.OPS,
    *functions.OPS,
    *strategy.OPS,
    *policies.OPS,
<<<<<<< HEAD
    *adapters.OPS,
=======
    *space.OPS,
>>>>>>> wt-search
    *contraction.OPS,
    *convolution.OPS,
    *extremes.OPS,
    *scan.OPS,
    *causal_conv.OPS,
    *scan_base.OPS,
    *state_space.OPS,
    *linear_attention.OPS,
    *rwkv.OPS,
    *token_shift.OPS,
    *selection.OPS,
    *activation.OPS,
    *gated.OPS,
    *norm.OPS,
    *attention.OPS,
    *ring.OPS,
    *rope.OPS,
    *indexer.OPS,
    *moe.OPS,
    *vocabulary.OPS,
    *losses.OPS,
    *recommend.OPS,
    *layout.OPS,
    *comm.OPS,
    *optimizer.OPS,
    *pipeline.OPS,
    *trace.OPS,
)
