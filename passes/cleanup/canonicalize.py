"""canonicalize: removes ops that change nothing."""

from stagec.api import Module, Pass, Phase
from stagec.ir.bind import drop_unit_axes
from stagec.ir.rewrite import canonicalize


class Canonicalize(Pass):
    """Remove what changes nothing: identities, pairs that cancel, collectives of a single rank.

    Before:
        stg.func @f(%x: bf16[B, S, D]) {
          %y = stg.scale[by = 1](%x) : bf16[B, S, D]
          %z = stg.cast[bf16](%y) : bf16[B, S, D]
          stg.return(%z)
        }
    After:
        stg.func @f(%x: bf16[B, S, D]) {
          stg.return(%x)
        }
    """

    needs = Phase.SHAPED
    until = Phase.PLANNED

    def run(self, module: Module) -> None:
        drop_unit_axes(module)
        canonicalize(module)
