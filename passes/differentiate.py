"""differentiate: appends the backward of the training step."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.transform.differentiate import differentiate


@dataclass(frozen=True)
class Differentiate(Pass):
    """Append the gradient of the loss with respect to every parameter, through repeats and
    accumulation.

    What backward needs of a repeat's forward comes out of it stacked: the stash is explicit.

    Before:
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> f32[] {
          %y = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%y) : f32[]
          stg.return(%l)
        }
    After:
        the same, then operations of phase backward, and `stg.gradient` for %w
    """

    name = "differentiate"
    needs = Phase.SHAPED
    until = Phase.PLACED
    gives = Phase.DIFFERENTIATED

    def run(self, module: Module) -> None:
        differentiate(module)
