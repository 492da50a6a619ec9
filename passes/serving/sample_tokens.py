"""sample-tokens: makes a step of serving return the chosen tokens instead of logits."""

from stagec.api import Module, Pass, Phase, made_by
from stagec.ir.drafts import most_likely, state
from stagec.ir.traits import PicksOne


class SampleTokens(Pass):
    """Return the most likely token in place of the logits of a step of serving.

    Greedy sampling stands for all kinds: temperatures, penalties and the sort of top-k and top-p
    are further passes over the same logits on each rank, without further communication.

    Before:
        stg.func @f(%x: bf16[B, S, D], %u: bf16[D, V | frozen], %k: bf16[B, S, D | cache])
            -> (f32[B, S, V], bf16[B, S, D]) {
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %logits = stg.cast[f32](%z) : f32[B, S, V]
          stg.return(%logits, %k)
        }
    After:
        stg.func @f(%x: bf16[B, S, D], %u: bf16[D, V | frozen], %k: bf16[B, S, D | cache])
            -> (i32[B, S], bf16[B, S, D | cache]) {
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %logits = stg.cast[f32](%z) : f32[B, S, V]
          %logits_sampled = stg.argmax(%logits) : i32[B, S]
          stg.return(%logits_sampled, %k)
        }
    """

    needs = Phase.SHAPED

    def run(self, module: Module) -> None:
        sample_tokens(module)


def sample_tokens(module: Module) -> None:
    """Sample from all logits that the main function returns, in place. If a token is already chosen
    from them, as for a draft model, it is returned."""
    body = module.main.body
    returned = list(body.terminator.operands)
    for index, logits in enumerate(returned[: len(returned) - len(state(module))]):
        if logits.tensor.dtype[0] in "iu":
            continue
        users = (op for op, _ in logits.uses if op.has(PicksOne))
        chosen = next(users, None)
        if chosen is not None:
            returned[index] = chosen.results[0]
            continue
        b = module.before(body.terminator, loc=made_by(SampleTokens.name, logits.loc))
        returned[index] = most_likely(b, logits, f"{logits.name}_sampled")
    body.terminator.set_operands(returned)
    body.returns = tuple(v.tensor for v in returned)
