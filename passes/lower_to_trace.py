"""lower-to-trace: the program of one rank as nodes with sizes in FLOPs and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.transform.lower import lower_to_trace


@dataclass(frozen=True)
class LowerToTrace(Pass):
    """Replace the function by an `et.graph`: computations and collectives of one rank, sizes still
    symbolic.

    Before:
        %y = stg.einsum["bd,df->bf"](%x, %w) : bf16[B@dp, F@tp]
        %z = stg.all_gather[dim = 1, over = tp](%y) : bf16[B@dp, F]
    After:
        %y = et.comp[einsum, flops = 2*B*D*F/(dp*tp), ..., out = 2*B*F/(dp*tp)](%x, %w) : node
        %z = et.coll[all_gather, group = tp, bytes = 2*B*F/dp, dtype = bf16](%y) : node
    """

    name = "lower-to-trace"
    needs = Phase.PARTITIONED
    until = Phase.PLANNED
    gives = Phase.LOWERED

    def run(self, module: Module) -> None:
        lower_to_trace(module)
