"""gather-logits: gathers logits that are split over the vocabulary before a token is chosen, or
before a loss that needs all of them."""

from stagec.api import Module, Operation, Pass, Phase, read_strategy
from stagec.ir.traits import PicksOne, Recasts, TakesLogits
from stagec.ir_spec.strategy.loss import LossRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.placer import Placer


class GatherLogits(Pass):
    """Replicate logits over the vocabulary where a token is chosen from them, in the element type
    of the head: engines gather them before they sample in f32 (`LogitsProcessor` of vLLM and of
    SGLang). With `stg.loss[logits = gathered]` this also applies to a loss.

    Without this pass each rank chooses among its own part of the vocabulary, and the maximum of
    each rank is gathered (`stg.argmax`).

    Before:
        stg.mesh @pod[tp]
        stg.assume[V % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[V, over = tp]
        }
        stg.func @f(%x: bf16[B, S, D | rep], %u: bf16[D, V@tp | frozen]) {
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %logits = stg.cast[f32](%z) : f32[B, S, V]
          %token = stg.argmax(%logits) : i32[B, S]
          stg.return(%token)
        }
    After:
        stg.mesh @pod[tp]
        stg.assume[V % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[V, over = tp]
        }
        stg.func @f(%x: bf16[B, S, D | rep], %u: bf16[D, V@tp | frozen]) {
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %z_whole = stg.sharding_constraint(%z) : bf16[B, S, V | rep]
          %logits = stg.cast[f32](%z_whole) : f32[B, S, V]
          %token = stg.argmax(%logits) : i32[B, S]
          stg.return(%token)
        }
    """

    needs = Phase.PLACED

    def applies(self, module: Module) -> bool:
        return bool(_users(module))

    def run(self, module: Module) -> None:
        gather_logits(module)


def gather_logits(module: Module) -> None:
    """Pin the logits from which the main function chooses tokens, or of losses, in place."""
    strategy = read_strategy(module)
    assumptions = Assumptions(module, GatherLogits.name, strategy.loc)
    placer = Placer(module, strategy, assumptions)
    for op in _users(module):
        _gather(module, placer, op)
    assumptions.check()


def _users(module: Module) -> list[Operation]:
    """The ops that take complete rows of logits."""
    gathered = read_strategy(module).one(LossRule).logits == "gathered"
    kinds = (PicksOne, TakesLogits) if gathered else (PicksOne,)
    return [op for op in module.main.body.walk() if any(map(op.has, kinds))]


def _gather(module: Module, placer: Placer, chooses: Operation) -> None:
    user, value = chooses, chooses.operands[0]
    while (made := value.producer) is not None and made.has(Recasts) and len(value.uses) == 1:
        user, value = made, made.operands[0]
    name = value.tensor.shape[-1].symbol_name
    if name is None:
        return
    b = module.before(user, loc=value.loc, by=GatherLogits.name)
    whole = placer.moved(value.tensor, (name,), ())
    pinned = b.value("stg.sharding_constraint", [value], type=whole, hint=f"{value.name}_whole")
    user.set_operand(0, pinned)
