"""eliminate-common-subexpressions: computes once what was computed twice."""

from stagec.api import Module, Pass, Phase
from stagec.ir.rewrite import eliminate_common_subexpressions


class EliminateCommonSubexpressions(Pass):
    """Use one result for operations that compute the same from the same values.

    They must belong to the same phase of the step. So what backward computes or gathers again
    stays.

    Before:
        stg.func @f(%x: bf16[B, S, D]) {
          %y = stg.gelu(%x) : bf16[B, S, D]
          %z = stg.gelu(%x) : bf16[B, S, D]
          %s = stg.add(%y, %z) : bf16[B, S, D]
          stg.return(%s)
        }
    After:
        stg.func @f(%x: bf16[B, S, D]) {
          %y = stg.gelu(%x) : bf16[B, S, D]
          %s = stg.add(%y, %y) : bf16[B, S, D]
          stg.return(%s)
        }
    """

    needs = Phase.SHAPED
    until = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        eliminate_common_subexpressions(module)
