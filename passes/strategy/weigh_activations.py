"""weigh-activations: multiplies the gated activations of experts by the weights of tokens."""

from stagec.api import Module, Operation, Pass, Phase, read_strategy
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.gated import Gated
from stagec.ir_spec.ops.moe import Combine, Dispatch, DispatchWeights
from stagec.ir_spec.strategy.moe import MoeRule


class WeighActivations(Pass):
    """Multiply the gated activations of experts by the weights of tokens, as
    `stg.moe[weights = activation]` states, in place of their results.

    The weights are copied to the rows of experts like tokens (`stg.dispatch_weights`). What
    experts return is added up as it is, so backward does not keep it. Experts without a gate, with
    an activation that runs operation by operation, or with biases of their results do not change.

    Before:
        stg.symbols[B, S, D, M, E, T]
        stg.strategy @s {
          stg.moe[weights = activation]
        }
        stg.func @f(%x: bf16[B, S, D], %w: f32[B, S, T], %e: i32[B, S, T], %u: bf16[E, D, 2, M],
                    %v: bf16[E, M, D]) -> bf16[B, S, D] {
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B, S*T/E, D | routed(E=2, T)]
          %g = stg.einsum["ebcd,edzm->ezbcm"](%xs, %u) :
              bf16[E, 2, B, S*T/E, M | routed(E=3, T)]
          %m = stg.swiglu(%g) : bf16[E, B, S*T/E, M | routed(E=2, T)]
          %ys = stg.einsum["ebcm,emd->ebcd"](%m, %v) : bf16[E, B, S*T/E, D | routed(E=2, T)]
          %y = stg.combine(%ys, %e, %w) : bf16[B, S, D]
          stg.return(%y)
        }
    After:
        stg.symbols[B, S, D, M, E, T]
        stg.strategy @s {
          stg.moe[weights = activation]
        }
        stg.func @f (%x: bf16[B, S, D], %w: f32[B, S, T], %e: i32[B, S, T], %u: bf16[E, D, 2, M],
                    %v: bf16[E, M, D]) -> bf16[B, S, D] {
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B, S*T/E, D | routed(E=2, T)]
          %w_rows = stg.dispatch_weights[count = E](%w, %e) : f32[E, B, S*T/E | routed(E=2, T)]
          %g = stg.einsum["ebcd,edzm->ezbcm"](%xs, %u) :
              bf16[E, 2, B, S*T/E, M | routed(E=3, T)]
          %m = stg.swiglu(%g, %w_rows) : bf16[E, B, S*T/E, M | routed(E=2, T)]
          %ys = stg.einsum["ebcm,emd->ebcd"](%m, %v) : bf16[E, B, S*T/E, D | routed(E=2, T)]
          %y = stg.combine(%ys, %e) : bf16[B, S, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(MoeRule).weights == "activation"

    def run(self, module: Module) -> None:
        weigh_activations(module)


def weigh_activations(module: Module) -> None:
    """Move the weights of all sums over experts to their gated activations, in place."""
    for op in [op for op in module.main.body.walk() if isinstance(op.definition, Combine)]:
        if len(op.operands) > 2:
            _move(module, op)


def _move(module: Module, combine: Operation) -> None:
    """Move the weights of a sum over experts, if its experts have a gated activation."""
    y, experts, weights = combine.operands
    last = y.producer
    gate = last.operands[0].producer if last and isinstance(last.definition, Einsum) else None
    if gate is None or not isinstance(gate.definition, Gated) or len(gate.result.uses) > 1:
        return
    users = [user for user, _ in experts.uses if isinstance(user.definition, Dispatch)]
    sent = next((user for user in users if len(user.operands) == 2), None)
    if sent is None:
        return
    b = module.after(sent, by=WeighActivations.name)
    rows = b.value(
        DispatchWeights.name, [weights, experts], dict(sent.attrs), hint=f"{weights.name}_rows"
    )
    gate.add_operand(rows)
    combine.set_operands([y, experts])
