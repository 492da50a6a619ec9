"""pad-dimensions: sizes become multiples of what a strategy says."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from stagec.api import Module, Pass, Phase, Strategy, evaluate, product, read_strategy
from stagec.ir_spec.strategy.pad_dimensions import PadDimensionsRule


@dataclass(frozen=True)
class PadDimensions(Pass):
    """Give symbols the next multiple of what `stg.pad_dimensions` says of them, times the ranks
    that split them. A remark states how many parameters that adds.

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

    name = "pad-dimensions"
    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).all(PadDimensionsRule))

    def run(self, module: Module) -> None:
        pad_dimensions(module, read_strategy(module))


def pad_dimensions(module: Module, strategy: Strategy) -> None:
    """Change the values of the symbols, in place; a remark says so where that changes nothing."""
    for rule in strategy.all(PadDimensionsRule):
        before, sizes = _parameters(module), dict[str, int]()
        for name in rule.dims:
            size, multiple = module.symbols[name], rule.multiple * _ranks(module, strategy, name)
            if size is not None and size % multiple:
                sizes[name] = -(-size // multiple) * multiple
        shown = ", ".join(f"{n} = {module.symbols[n]} is {v}" for n, v in sizes.items())
        module.set_values(sizes)
        after = _parameters(module)
        if not sizes:
            module.diagnostics.remark(
                "'stg.pad_dimensions' changes nothing: sizes divide already, or are open", rule.loc
            )
        elif before is not None and after is not None:
            module.diagnostics.remark(
                f"{shown}: {after - before:,} parameters more, {after / before - 1:.2%}, with as "
                "many FLOPs each as others",
                rule.loc,
            )


def _parameters(module: Module) -> int | None:
    """The elements of all parameters; None if a size is open."""
    sizes = [product(p.tensor.shape) for p in module.parameters()]
    if any(not size.symbols <= module.env.keys() for size in sizes):
        return None
    return sum(evaluate(size, module.env) for size in sizes)


def _ranks(module: Module, strategy: Strategy, name: str) -> int:
    """The ranks that split a dimension, as far as their number is known."""
    mesh = module.mesh
    axes = {a for rule in strategy.splits if name in rule.dims for a in rule.over}
    return prod(mesh.sizes.get(a) or 1 for a in axes) if mesh is not None else 1
