"""Model FLOPs and tokens of a step, from the text of the model, however it is compiled.

Papers divide FLOPs by time and peak for the model FLOPs utilization (MFU, arXiv 2204.02311,
appendix B; 2205.05198, section 5.3). Matrix products and fused attention count: attention at half
under a causal mask, and by its unmasked pairs under other masks. Backward is twice forward, and
recomputation does not count. Backward of a product with a frozen weight has only the gradient of
the other operand, and none if nothing before it is trained; low-rank adapters themselves, less than
a percent, do not count. Products of routers count: DeepSeek-V3 with multi-token prediction has
260.64 GFLOP per token at a sequence of 4,096, while Megatron-Core, which leaves them out, publishes
260.02. Attention that a text writes as products and a softmax counts with all its scores, as in
arXiv 2104.04473, equation 3.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ZERO, Expr, const, evaluate, substitute, symbol, total
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.module import BATCH, Module
from stagec.ir.trained import trained_values
from stagec.ir.types import TensorType
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.freeze import FreezeRule
from stagec.ir_spec.strategy.lora import LoraRule
from stagec.ir_spec.strategy.redundant_experts import CopiesRule
from stagec.sharding.strategy import read_strategy

#: The gradients of a product, one for each operand.
_BOTH = 2
#: The number of required gradients of a product or of attention.
_Needed = Callable[[Operation], int]


class ModelFlops(NamedTuple):
    """The FLOPs of a model over all ranks, by its text: of forward, and of backward if it is
    trained."""

    forward: Expr
    backward: Expr


def model_flops(module: Module) -> ModelFlops:
    """The FLOPs of a typed module: matrix products, and attention with its unmasked pairs (half of
    them if it is causal). Copies of experts are not of the model."""
    needed = _needed(module)
    flops = _sum(_of_region(func.body, needed) for func in module.functions)
    if not (copies := read_strategy(module).one(CopiesRule).count):
        return flops
    own = {EXPERTS: symbol(EXPERTS) - copies}
    return ModelFlops(*(substitute(part, own) for part in flops))


def step_flops(flops: ModelFlops, graphs: Sequence[Operation]) -> Expr:
    """The FLOPs of a step, with backward if its graphs have one."""
    trains = any(op.phase == "backward" for graph in graphs for op in graph.body.walk())
    return flops.forward + flops.backward if trains else flops.forward


def summed(models: Iterable[tuple[ModelFlops | None, Module]]) -> ModelFlops | None:
    """The FLOPs of several models, each with the sizes of its own module; None if those of one are
    unknown."""
    each = list(models)
    if len(each) == 1:
        return each[0][0]
    sums = [0, 0]
    for flops, module in each:
        if flops is None:
            return None
        sums = [n + evaluate(part, module.env) for n, part in zip(sums, flops, strict=True)]
    return ModelFlops(*map(const, sums))


def _needed(module: Module) -> _Needed:
    """The required gradients: those of operands that are trained or depend on trained values.
    `stg.lora` adds adapters to parameters, which are trained in place of all parameters;
    `stg.freeze` overrides this for each parameter."""
    body, every, strategy = module.main.body, module.parameters(), read_strategy(module)
    adapted = {*filter(strategy.one(LoraRule).adapts, every)}
    frozen = {p: strategy.one(FreezeRule).freezes(p.name) for p in every}
    given = set[Value]() if adapted else set(module.trainable())
    trained = {p for p in every if frozen[p] is False or (frozen[p] is None and p in given)}
    if len(trained) == len(every):
        return lambda _: _BOTH
    values = trained_values(body, trained | adapted) - _bound(body, adapted - trained)

    def needed(op: Operation) -> int:
        return min(_BOTH, sum(v in values for v in op.operands))

    return needed


def _bound(body: Region, given: set[Value]) -> set[Value]:
    """These values, and the arguments of regions that are bound to them."""
    bound = set(given)
    for op in body.walk():
        if op.region is not None:
            pairs = zip(op.operands, op.body.args, strict=False)
            bound.update(arg for value, arg in pairs if value in bound)
    return bound


def step_tokens(module: Module) -> Expr | None:
    """The tokens of a step over all ranks: the elements of the first input of integers with two
    dimensions (lists of rows to look up have three) that depends on the batch (tables of distances
    do not); None without one."""
    types = (arg.type for arg in module.main.body.args)
    sizes = (t.elements for t in types if isinstance(t, TensorType) and _of_tokens(t))
    batched = BATCH in module.symbols
    return next((tokens for tokens in sizes if not batched or BATCH in tokens.symbols), None)


def _of_tokens(type_: TensorType) -> bool:
    return type_.rank == 2 and type_.dtype.startswith(("i", "u"))


def _sum(each: Iterable[ModelFlops]) -> ModelFlops:
    some = [*each]
    return ModelFlops(total(e.forward for e in some), total(e.backward for e in some))


def _of_region(region: Region, needed: _Needed) -> ModelFlops:
    return _sum(_of(op, needed) for op in region.ops if op.phase == "forward")


def _of(op: Operation, needed: _Needed) -> ModelFlops:
    if op.region is not None:
        inner = _of_region(op.region, needed)
        times = op.expr("count") if "count" in op.attrs else const(1)
        return ModelFlops(inner.forward * times, inner.backward * times)
    rule = op.definition.rule(op)
    if rule is None:
        return _NOTHING
    n = factor_sizes(op, rule)
    products = op.definition.matmul_flops(op, n)
    kernel = op.definition.kernel(op, n)
    if kernel is None or kernel.kind != "attention":
        return ModelFlops(products, products * const(needed(op)))
    flops = products / 2 if kernel.causal else op.definition.flops(op, n)
    return ModelFlops(flops, flops * const(_BOTH if needed(op) else 0))


_NOTHING = ModelFlops(ZERO, ZERO)
