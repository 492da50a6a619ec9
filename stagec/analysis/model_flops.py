"""Model FLOPs and tokens: what a step does by the model's text, however it is compiled.

Papers divide FLOPs by time and peak for the model FLOPs utilization (MFU, arXiv 2204.02311,
appendix B; 2205.05198, section 5.3). Counted are matrix products and fused attention, attention
under a causal mask at half, under other masks with the pairs that they leave; backward is twice
forward, and nothing is computed again. Products of routers count: DeepSeek-V3 with multi-token
prediction has 260.64 GFLOP a token at a sequence of 4,096, where Megatron-Core, which leaves them
out, publishes 260.02. Attention that a text writes as products and a softmax counts with all its
scores, as in arXiv 2104.04473, equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagec.ir.core import Operation, Region
from stagec.ir.expr import ZERO, Expr, const, total
from stagec.ir.module import BATCH, Module
from stagec.ir.opdef import factor_sizes
from stagec.ir.types import TensorType

#: Forward, and backward at twice that.
TRAINING = const(3)


def model_flops(module: Module) -> Expr:
    """FLOPs of forward by a module with types, of all ranks together: matrix products, and
    attention with half of the pairs if it is causal, or those that another mask leaves."""
    return total(_of_region(func.body) for func in module.functions)


def step_flops(forward: Expr, graphs: Sequence[Operation]) -> Expr:
    """Those of a step: with backward three times those of forward."""
    trains = any(op.phase == "backward" for graph in graphs for op in graph.body.walk())
    return forward * TRAINING if trains else forward


def step_tokens(module: Module) -> Expr | None:
    """Tokens of a step of all ranks: elements of the first input of whole numbers of each sequence
    (two dimensions; lists of rows to look up have three, and tables of distances know of no batch);
    None without one."""
    types = (arg.type for arg in module.main.body.args)
    found = (t.elements for t in types if isinstance(t, TensorType) and _of_tokens(t))
    batched = BATCH in module.symbols
    return next((tokens for tokens in found if not batched or BATCH in tokens.symbols), None)


def _of_tokens(type_: TensorType) -> bool:
    return type_.rank == 2 and type_.dtype.startswith(("i", "u"))


def _of_region(region: Region) -> Expr:
    return total(_of(op) for op in region.ops if op.phase == "forward")


def _of(op: Operation) -> Expr:
    if op.region is not None:
        times = op.expr("count") if "count" in op.attrs else const(1)
        return _of_region(op.region) * times
    rule = op.definition.rule(op)
    if rule is None:
        return ZERO
    n = factor_sizes(op, rule)
    products = op.definition.matmul_flops(op, n)
    kernel = op.definition.kernel(op, n)
    if kernel is None or kernel.kind != "attention":
        return products
    return products / 2 if kernel.causal else op.definition.flops(op, n)
