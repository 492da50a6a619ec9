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
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> (f32[], f32[B]) {
          %y = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%y) : f32[]
          %d_loss = stg.constant[value = 1, phase = backward] : f32[]
          %d_y = stg.broadcast["->b", sizes = B, phase = backward](%d_loss) : f32[B]
          %d_x = stg.mul[phase = backward](%d_y, %w) : f32[B]
          %d_w = stg.mul[phase = backward](%d_y, %x) : f32[B]
          %g_w = stg.gradient[phase = gradient](%d_w) : f32[B]
          stg.return(%l, %g_w)
        }
    """

    name = "differentiate"
    needs = Phase.SHAPED
    until = Phase.PLACED
    gives = Phase.DIFFERENTIATED

    def run(self, module: Module) -> None:
        differentiate(module)
