"""pad-dimensions: rounds sizes up to the multiples that a strategy states."""

from collections.abc import Iterable, Mapping

from stagec.api import Loc, Module, Pass, Phase, Strategy, evaluate, product, read_strategy
from stagec.ir_spec.ops.quantized import FORMATS
from stagec.ir_spec.strategy.axes import EXPERT_WIDTH
from stagec.ir_spec.strategy.pad_dimensions import PadDimensionsRule
from stagec.ir_spec.strategy.weights import WeightsRule


class PadDimensions(Pass):
    """Round symbols up to the multiple in `stg.pad_dimensions` times the number of ranks that split
    them. The width of experts is rounded up to a block of their format, if that is
    `stg.weights[fill]`. A remark states the number of added parameters.

    Before:
        stg.symbols[B, D = 64, M = 90]
        stg.mesh @pod[tp = 4]
        stg.strategy @s[mesh = @pod] {
          stg.split[M, over = tp]
          stg.pad_dimensions[M, multiple = 8]
        }
        stg.func @f(%x: bf16[B, D], %w: bf16[D, M | param]) {
          %y = stg.einsum["bd,dm->bm"](%x, %w) : bf16[B, M]
          stg.return(%y)
        }
    After:
        stg.symbols[B, D = 64, M = 96]
        stg.mesh @pod[tp = 4]
        stg.strategy @s[mesh = @pod] {
          stg.split[M, over = tp]
          stg.pad_dimensions[M, multiple = 8]
        }
        stg.func @f(%x: bf16[B, D], %w: bf16[D, M | param]) {
          %y = stg.einsum["bd,dm->bm"](%x, %w) : bf16[B, M]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return bool(strategy.all(PadDimensionsRule)) or _fills(module, strategy.one(WeightsRule))

    def run(self, module: Module) -> None:
        pad_dimensions(module, read_strategy(module))


def pad_dimensions(module: Module, strategy: Strategy) -> None:
    """Change the values of the symbols, in place; a remark reports a `stg.pad_dimensions` without
    effect."""
    for rule in strategy.all(PadDimensionsRule):
        if not _pad(module, strategy, rule.dims, rule.multiple, rule.loc):
            module.diagnostics.remark(
                "'stg.pad_dimensions' changes nothing: sizes divide already, or are open", rule.loc
            )
    weights = strategy.one(WeightsRule)
    if _fills(module, weights):
        _pad(module, strategy, (EXPERT_WIDTH,), FORMATS[weights.format].rows or 1, weights.loc)


def _fills(module: Module, rule: WeightsRule) -> bool:
    """Whether experts have the format for which their width is padded."""
    return rule.fill == rule.format and EXPERT_WIDTH in module.symbols


def _pad(
    module: Module, strategy: Strategy, dims: Iterable[str], multiple: int, loc: Loc
) -> Mapping[str, int]:
    """Pad dimensions to a multiple. Returns the changed sizes."""
    sizes = dict[str, int]()
    for name in dims:
        size, wanted = module.symbols[name], multiple * strategy.ranks_of(name, module.mesh)
        if size is not None and size % wanted:
            sizes[name] = -(-size // wanted) * wanted
    if not sizes:
        return sizes
    shown = ", ".join(f"{n} = {module.symbols[n]} is {v}" for n, v in sizes.items())
    before = _parameters(module)
    module.set_values(sizes)
    after = _parameters(module)
    if before is not None and after is not None:
        module.diagnostics.remark(
            f"{shown}: {after - before:,} parameters more, {after / before - 1:.2%}, with as many "
            "FLOPs each as others",
            loc,
        )
    return sizes


def _parameters(module: Module) -> int | None:
    """The number of elements of all parameters; None if a size has no value."""
    sizes = [product(p.tensor.shape) for p in module.parameters()]
    if any(not size.symbols <= module.env.keys() for size in sizes):
        return None
    return sum(evaluate(size, module.env) for size in sizes)
