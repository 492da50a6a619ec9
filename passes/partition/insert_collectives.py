"""insert-collectives: every change of placement becomes an op."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagec.api import Module, Pass, Phase
from stagec.sharding.insert import insert_collectives
from stagec.sharding.kept import keep_parameters
from stagec.sharding.loads import note_rows
from stagec.sharding.narrow import order_casts
from stagec.sharding.stages import accumulation, pipeline_rule
from stagec.sharding.strategy import read_strategy


@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Insert the collectives that bring each operand to the placement that its op needs.

    A value that several ops need in the same placement is moved once.

    Before:
        stg.func @f(%x: bf16[B, S, F@tp], %w: bf16[F@tp, D]) {
          %y = stg.einsum["bsf,fd->bsd"](%x, %w) : bf16[B, S, D | sum(tp)]
          %z = stg.gelu(%y) : bf16[B, S, D | rep]
          stg.return(%z)
        }
    After:
        stg.func @f(%x: bf16[B, S, F@tp], %w: bf16[F@tp, D]) {
          %y = stg.einsum["bsf,fd->bsd"](%x, %w) : bf16[B, S, D | sum(tp)]
          %y_r = stg.all_reduce[over = tp](%y) : bf16[B, S, D | rep]
          %z = stg.gelu(%y_r) : bf16[B, S, D | rep]
          stg.return(%z)
        }
    """

    name = "insert-collectives"
    needs = Phase.SHARDED
    gives = Phase.PARTITIONED

    save_gathered: bool = field(
        default=False,
        metadata={"help": "keep for backward what forward gathered, instead of gathering it again"},
    )

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        insert_collectives(module, save_gathered=self.save_gathered or strategy.save_gathered)
        order_casts(module)
        if strategy.reshard == "last" or pipeline_rule(accumulation(module)) is None:
            keep_parameters(module, strategy.reshard)
        note_rows(module)
