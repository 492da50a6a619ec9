"""infer-shapes: gives every value a type."""

from stagec.api import Module, Pass, Phase
from stagec.ir.infer import infer_module


class InferShapes(Pass):
    """Infer the types that the text leaves out, and check those that it states.

    Before:
        stg.func @f(%x: bf16[B, S, D], %w: bf16[D, F]) {
          %y = stg.einsum["bsd,df->bsf"](%x, %w)
          stg.return(%y)
        }
    After:
        stg.func @f (%x: bf16[B, S, D], %w: bf16[D, F]) {
          %y = stg.einsum["bsd,df->bsf"](%x, %w) : bf16[B, S, F]
          stg.return(%y)
        }
    """

    needs = Phase.PARSED
    gives = Phase.SHAPED

    def run(self, module: Module) -> None:
        infer_module(module)
