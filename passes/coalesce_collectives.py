"""coalesce-collectives: one call where a framework makes one."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.transform.coalesce import coalesce


@dataclass(frozen=True)
class CoalesceCollectives(Pass):
    """Merge the gathers of the parameters of a block, and the reductions of their gradients, into
    one call each.

    Before:
        %a_g = stg.all_gather[dim = 0, over = dp](%a) : bf16[D, F]
        %b_g = stg.all_gather[dim = 1, over = dp](%b) : bf16[F, D]
    After:
        %a_g, %b_g = stg.all_gather[dim = (0, 1), over = dp](%a, %b) : (bf16[D, F], bf16[F, D])
    """

    name = "coalesce-collectives"
    needs = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        coalesce(module)
