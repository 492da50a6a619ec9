"""apply-strategy: puts a model on a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.transform.apply_strategy import apply_strategy


@dataclass(frozen=True)
class ApplyStrategy(Pass):
    """Turn the statements of the module's `stg.strategy` into placements, assumptions and
    microbatches.

    Axes of size 1 vanish. A placement that the model pins wins over the strategy.

    Before:
        stg.mesh @pod[dp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    After:
        stg.mesh @pod[dp = 2]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B@dp, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    """

    name = "apply-strategy"
    needs = Phase.SHAPED
    gives = Phase.PLACED

    def run(self, module: Module) -> None:
        apply_strategy(module)
