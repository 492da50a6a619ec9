"""propagate-sharding: every value gets a placement."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.sharding.propagate import propagate


@dataclass(frozen=True)
class PropagateSharding(Pass):
    """Spread the placements of arguments and pinned values over all values.

    They flow through the rules of the ops. Placements of priority 0 go first, then those at rest
    (`!1`, `!2`).

    Before:
        stg.func @f(%x: bf16[B@dp, S, D], %w: bf16[D, F@tp]) {
          %y = stg.einsum["bsd,df->bsf"](%x, %w) : bf16[B, S, F]
          stg.return(%y)
        }
    After:
        stg.func @f(%x: bf16[B@dp, S, D], %w: bf16[D, F@tp]) {
          %y = stg.einsum["bsd,df->bsf"](%x, %w) : bf16[B@dp, S, F@tp]
          stg.return(%y)
        }
    """

    name = "propagate-sharding"
    needs = Phase.SHAPED
    until = Phase.DIFFERENTIATED
    gives = Phase.SHARDED

    def run(self, module: Module) -> None:
        if module.phase == Phase.SHAPED.label and module.ops("stg.strategy"):
            module.diagnostics.remark(
                "the strategy is not applied: run 'apply-strategy' before 'propagate-sharding'",
                module.ops("stg.strategy")[0].loc,
            )
        propagate(module)
