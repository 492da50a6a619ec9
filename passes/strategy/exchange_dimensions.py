"""exchange-dimensions: moves a split to other dimensions around an op (Ulysses)."""

from collections.abc import Sequence

from stagec.api import Module, Operation, Pass, Phase, Strategy, read_strategy
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.placer import Placer
from stagec.sharding.special_factors import special_ops

PIN = "stg.sharding_constraint"


class ExchangeDimensions(Pass):
    """Move the split of a dimension to others around an op, as `stg.exchange` states (Ulysses).

    Two constraints are added before each operand and after the result: one for the placement
    outside, one for the placement in which the op runs. 'insert-collectives' turns each pair into
    an all_to_all.

    Before:
        stg.mesh @pod[cp]
        stg.assume[S % cp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[S, over = cp]
          stg.exchange[S, into = H]
        }
        stg.func @f(%q: bf16[B, S@cp, H, K], %kv: bf16[B, 2, S@cp, H, K]) {
          %a = stg.attention[causal](%q, %kv) : bf16[B, S, H, K]
          stg.return(%a)
        }
    After:
        stg.mesh @pod[cp]
        stg.assume[S % cp == 0]
        stg.assume[H % cp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[S, over = cp]
          stg.exchange[S, into = H]
        }
        stg.func @f(%q: bf16[B, S@cp, H, K], %kv: bf16[B, 2, S@cp, H, K]) {
          %q_2 = stg.sharding_constraint[both](%q) : bf16[B, S@cp, H, K]
          %q_3 = stg.sharding_constraint(%q_2) : bf16[B, S, H@cp, K]
          %kv_2 = stg.sharding_constraint[both](%kv) : bf16[B, 2, S@cp, H, K]
          %kv_3 = stg.sharding_constraint(%kv_2) : bf16[B, 2, S, H@cp, K]
          %a = stg.attention[causal](%q_3, %kv_3) : bf16[B, S, H, K]
          %a_2 = stg.sharding_constraint[both](%a) : bf16[B, S, H@cp, K]
          %a_3 = stg.sharding_constraint(%a_2) : bf16[B, S@cp, H, K]
          stg.return(%a_3)
        }
    """

    needs = Phase.PLACED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).exchanged)

    def run(self, module: Module) -> None:
        exchange_dimensions(module, read_strategy(module))


def exchange_dimensions(module: Module, strategy: Strategy) -> None:
    """Pin operands and results of the affected ops, in place.

    Raises `DiagnosticError` if there is no such op, and for sizes that do not divide.
    """
    assumptions = Assumptions(module, ExchangeDimensions.name, strategy.loc)
    placer = Placer(module, strategy, assumptions)
    for into in dict.fromkeys(into for _, into in strategy.exchanged):
        names = tuple(name for name, others in strategy.exchanged if others == into)
        special = [op for name in names for op, _ in special_ops(module.main.body, name, names)]
        ops = [op for op in dict.fromkeys(special) if _has(op, into)]
        if not ops:
            raise strategy.error(
                f"no op needs {' or '.join(names)} unsplit, so there is nothing to exchange",
                remedy="use --cp-mode all-gather: 'exchange' works around fused attention only",
            )
        for op in ops:
            _exchange_operands(module, placer, op, names, into)
            _exchange_back(module, placer, op, names, into)
    assumptions.check()


def _has(op: Operation, dims: Sequence[str]) -> bool:
    """Whether the result of an op has one of these dimensions; other ops are not changed."""
    return any(d.size.symbol_name in dims for d in op.results[0].tensor.dims)


def _exchange_operands(
    module: Module, placer: Placer, op: Operation, names: tuple[str, ...], into: Sequence[str]
) -> None:
    b = module.before(op, by=ExchangeDimensions.name)
    for index, value in enumerate(op.operands):
        if value.tensor.rank > 1:
            source = placer.place(value.tensor.unplaced(), rest=False)
            target = placer.moved(value.tensor, names, into)
            here = b.value(PIN, [value], {"both": True}, type=source, hint=value.name)
            op.set_operand(index, b.value(PIN, [here], type=target, hint=value.name))


def _exchange_back(
    module: Module, placer: Placer, op: Operation, names: tuple[str, ...], into: Sequence[str]
) -> None:
    b = module.after(op, by=ExchangeDimensions.name)
    result, users = op.results[0], list(op.results[0].uses)
    target = placer.place(result.tensor.unplaced(), rest=False)
    source = placer.moved(result.tensor, names, into)
    here = b.value(PIN, [result], {"both": True}, type=source, hint=result.name)
    result.replace_with(b.value(PIN, [here], type=target, hint=result.name), users)
