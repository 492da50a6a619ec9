"""The statements of a strategy, one per file: how a model is split over a mesh and how it runs,
without changes to its text. `STATEMENTS` lists them."""

from importlib import import_module

from stagec.ir_spec.ops import ops_of
from stagec.ir_spec.strategy.statement import Statement

#: In the order in which flags write them.
_MODULES = """
    split defer exchange ring shard_params shard_units shard_padding microbatches pipeline
    gather tp_inputs tp_outputs blocking fusion capacity expert_load routing dtypes autocast
    bucket recompute selective offload optimizer gradients inputs saved_tensors stage_buffers
    loss kernels hosts scheduler sustained collectives moe redundant_experts weights lora adapters
    dropout freeze pad_vocabulary pad_dimensions part machine
"""
STATEMENTS: tuple[Statement, ...] = tuple(
    op
    for name in _MODULES.split()
    for op in ops_of(import_module(f"{__name__}.{name}"))
    if isinstance(op, Statement)
)
