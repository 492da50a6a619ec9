"""order-shared-experts: computes shared experts before tokens are sent to the routed ones."""

from collections.abc import Sequence

from stagec.api import Module, Operation, Pass, Phase, Region, read_strategy
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.moe import Dispatch
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.models import is_shipped
from stagec.sharding.checkpoints import checkpoints


class OrderSharedExperts(Pass):
    """Move shared experts before the dispatch of tokens to the routed ones, as
    `stg.moe[shared = first]` states. Backward has the reverse order.

    Before:
        stg.symbols[B, S, D, F, E, T, L]
        stg.strategy @s {
          stg.moe[shared = first]
        }
        stg.func @f(%x: bf16[B, S, D], %e: i32[B, S, T], %s: bf16[L, D], %w: bf16[L, D, D]) {
          %y = stg.repeat[count = L] (%h: bf16[B, S, D] = %x, %t: bf16[D] = %s,
                                      %u: bf16[D, D] = %w) {
            %n = stg.rmsnorm(%h, %t) : bf16[B, S, D]
            %xs = stg.dispatch[count = E](%n, %e) : bf16[E, B, S*T/E, D | routed(E=2, T)]
            %o = stg.combine(%xs, %e) : bf16[B, S, D]
            %m = stg.einsum["bsd,de->bse"](%n, %u) : bf16[B, S, D]
            %a = stg.add(%o, %m) : bf16[B, S, D]
            %r = stg.add(%h, %a) : bf16[B, S, D]
            stg.yield(%r)
          } : bf16[B, S, D]
          stg.return(%y)
        }
    After:
        stg.symbols[B, S, D, F, E, T, L]
        stg.strategy @s {
          stg.moe[shared = first]
        }
        stg.func @f(%x: bf16[B, S, D], %e: i32[B, S, T], %s: bf16[L, D], %w: bf16[L, D, D]) {
          %y = stg.repeat[count = L] (%h: bf16[B, S, D] = %x, %t: bf16[D] = %s,
                                      %u: bf16[D, D] = %w) {
            %n = stg.rmsnorm(%h, %t) : bf16[B, S, D]
            %m = stg.einsum["bsd,de->bse"](%n, %u) : bf16[B, S, D]
            %xs = stg.dispatch[count = E](%n, %e) : bf16[E, B, S*T/E, D | routed(E=2, T)]
            %o = stg.combine(%xs, %e) : bf16[B, S, D]
            %a = stg.add(%o, %m) : bf16[B, S, D]
            %r = stg.add(%h, %a) : bf16[B, S, D]
            stg.yield(%r)
          } : bf16[B, S, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(MoeRule).shared == "first"

    def run(self, module: Module) -> None:
        moved = 0
        for repeat in [op for op in module.main.body.walk() if op.has(Repeats)]:
            for shared in checkpoints(repeat.body, ["shared_experts"]):
                moved += _move(repeat.body, shared.ops)
        rule = read_strategy(module).one(MoeRule)
        if not moved and not is_shipped(rule.loc):
            said = "'shared = first' of 'stg.moe' changes nothing: no shared experts follow others"
            module.diagnostics.remark(said, rule.loc)


def _move(body: Region, ops: Sequence[Operation]) -> int:
    """Move operations that follow the first dispatch of a block before it; how many they are."""
    sent = next(op for op in body.ops if isinstance(op.definition, Dispatch))
    late = [op for op in ops if op.position() > sent.position()]
    for op in late:
        body.ops.remove(op)
        body.insert(sent.position(), op)
    return len(late)
