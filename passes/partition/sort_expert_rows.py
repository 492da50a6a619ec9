"""sort-expert-rows: adds the copies of exchanged rows into the order of experts, and back."""

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    TensorType,
    Value,
    const,
    read_strategy,
)
from stagec.ir.expr import same
from stagec.ir_spec.ops.comm import AllGather, AllToAll, ReduceScatter
from stagec.ir_spec.ops.moe import SortRows
from stagec.ir_spec.strategy.moe import MoeRule


class SortExpertRows(Pass):
    """Add `stg.sort_rows` after each all_to_all that sends rows to experts, and before each that
    sends them back, where ranks that split experts have gathered rows and not yet reduced results.

    `stg.moe[sort]` asks for it, as Megatron-Core does (megatron/core/transformer/moe,
    token_dispatcher.py: `sort_chunks_by_idxs` in `dispatch_postprocess` and `combine_preprocess`).
    A rank with one expert has nothing to sort, and the kernels of `stg.moe[dispatch = deepep]` sort
    themselves.

    Before:
        stg.symbols[B, S, D, E, T]
        stg.mesh @pod[ep]
        stg.assume[E % ep == 0, B % ep == 0]
        stg.strategy @s[mesh = @pod] {
          stg.moe[sort]
        }
        stg.func @f(%x: bf16[E, B@ep, S, D | routed(E=2, T)]) {
          %y = stg.all_to_all[from = 1, dim = 0, over = ep](%x) :
              bf16[E@ep, B, S, D | routed(E=2, T)]
          stg.return(%y)
        }
    After:
        stg.symbols[B, S, D, E, T]
        stg.mesh @pod[ep]
        stg.assume[E % ep == 0, B % ep == 0]
        stg.strategy @s[mesh = @pod] {
          stg.moe[sort]
        }
        stg.func @f(%x: bf16[E, B@ep, S, D | routed(E=2, T)]) {
          %y = stg.all_to_all[from = 1, dim = 0, over = ep](%x) :
              bf16[E@ep, B, S, D | routed(E=2, T)]
          %y_sorted = stg.sort_rows(%y) : bf16[E@ep, B, S, D | routed(E=2, T)]
          stg.return(%y_sorted)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        rule = read_strategy(module).one(MoeRule)
        return rule.sort and rule.dispatch == "all_to_all"

    def run(self, module: Module) -> None:
        sort_expert_rows(module)


def sort_expert_rows(module: Module) -> None:
    """Sort the rows that exchanges send to experts and back, in place."""
    moves = [op for op in module.main.body.walk() if isinstance(op.definition, AllToAll)]
    for op in moves:
        for index, (value, result) in enumerate(zip(op.operands, op.results, strict=True)):
            if _has_experts(result.tensor):
                rows = _gathered(result)
                b = module.after(rows.producer or op, by=SortExpertRows.name)
                rows.replace_with(_sorted(b, rows))
            elif _has_experts(value.tensor):
                user, slot = _unreduced(op, index)
                b = module.before(user, by=SortExpertRows.name)
                user.set_operand(slot, _sorted(b, user.operands[slot]))


def _gathered(rows: Value) -> Value:
    """Rows that were exchanged, or what ranks that split their experts gather of these."""
    users = [user for user, _ in rows.uses]
    alone = len(users) == 1 and isinstance(users[0].definition, AllGather)
    return users[0].results[users[0].operands.index(rows)] if alone else rows


def _unreduced(exchange: Operation, index: int) -> tuple[Operation, int]:
    """The operation that takes rows before they are exchanged, or before they are reduced."""
    rows = exchange.operands[index]
    if rows.producer is not None and isinstance(rows.producer.definition, ReduceScatter):
        return rows.producer, rows.index
    return exchange, index


def _has_experts(type_: TensorType) -> bool:
    """Whether a value has rows of several experts per rank, split over ranks by expert."""
    routed = {d.routed.of for d in type_.dims if d.routed}
    loaded = {d.load.of for d in type_.dims if d.load}
    sizes = [d for d in type_.dims if d.size in routed or d.size.symbol_name in loaded]
    return any(d.split and not same(d.local, const(1)) for d in sizes)


def _sorted(b: Builder, value: Value) -> Value:
    return b.value(SortRows.name, [value], type=value.type, hint=f"{value.name}_sorted")
