"""eliminate-dead-code: removes what nobody uses."""

from stagec.api import Module, Pass, Phase
from stagec.ir.rewrite import eliminate_dead_code


class EliminateDeadCode(Pass):
    """Erase operations whose results are unused, and unused slices and stacks of repeats.

    Before:
        stg.func @f(%x: bf16[B, S, D]) {
          %y = stg.gelu(%x) : bf16[B, S, D]
          %z = stg.silu(%y) : bf16[B, S, D]
          stg.return(%y)
        }
    After:
        stg.func @f(%x: bf16[B, S, D]) {
          %y = stg.gelu(%x) : bf16[B, S, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED
    until = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        eliminate_dead_code(module)
