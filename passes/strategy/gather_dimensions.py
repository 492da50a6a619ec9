"""gather-dimensions: gathers operands in a dimension whose split an op treats specially, and tokens
at the ranks of their experts."""

from stagec.api import Module, Operation, Pass, Phase, Strategy, Value, read_strategy, symbol
from stagec.ir.builder import RawAttr
from stagec.ir_spec.strategy.gather import GatherRule
from stagec.ir_spec.strategy.moe import GATHER, MoeRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.placer import Placer
from stagec.sharding.special_factors import special_ops

PIN = "stg.sharding_constraint"


class GatherDimensions(Pass):
    """Pin operands as unsplit in the dimensions of `stg.gather` where an op treats a split
    specially.

    With an unsplit sequence of keys and values, each rank computes attention for its own queries.
    Where `stg.moe[dispatch = gather]` made ops `local`, their token operands are pinned as not
    split over the axes of the experts. With `regather` the pins are marked `again`: 'differentiate'
    gives backward pins of its own.

    Before:
        stg.mesh @pod[cp]
        stg.assume[S % cp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[S, over = cp]
          stg.gather[S]
        }
        stg.func @f(%q: bf16[B, S@cp, H, K], %kv: bf16[B, 2, S@cp, H, K]) {
          %a = stg.attention[causal](%q, %kv) : bf16[B, S, H, K]
          stg.return(%a)
        }
    After:
        stg.mesh @pod[cp]
        stg.assume[S % cp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[S, over = cp]
          stg.gather[S]
        }
        stg.func @f(%q: bf16[B, S@cp, H, K], %kv: bf16[B, 2, S@cp, H, K]) {
          %kv_2 = stg.sharding_constraint(%kv) : bf16[B, 2, S, H, K | rep]
          %a = stg.attention[causal](%q, %kv_2) : bf16[B, S, H, K]
          stg.return(%a)
        }
    """

    needs = Phase.PLACED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return bool(strategy.gathered) or strategy.one(MoeRule).dispatch == GATHER

    def run(self, module: Module) -> None:
        gather_dimensions(module, read_strategy(module))
        gather_tokens(module, read_strategy(module))


def gather_dimensions(module: Module, strategy: Strategy) -> None:
    """Pin the affected operands, in place; a remark reports that there are none."""
    assumptions = Assumptions(module, GatherDimensions.name, strategy.loc)
    placer = Placer(module, strategy, assumptions)
    for rule in (rule for rule in strategy.all(GatherRule) if not rule.of):
        attrs: dict[str, RawAttr] = {"again": True} if rule.regather else {}
        for op, operands in _concerned(module, rule).items():
            b = module.before(op, by=GatherDimensions.name)
            for index in operands:
                value = op.operands[index]
                whole = placer.moved(value.tensor, rule.dims, ())
                op.set_operand(index, b.value(PIN, [value], attrs, type=whole, hint=value.name))
    assumptions.check()


def gather_tokens(module: Module, strategy: Strategy) -> None:
    """Pin the token operands of ops that are `local`, in place, where tokens are split over axes of
    the experts."""
    placer = Placer(module, strategy, Assumptions(module, GatherDimensions.name, strategy.loc))
    pinned: dict[Value, Value] = {}
    for op in [op for op in module.walk() if op.flag("local")]:
        experts = {d.size for d in _buffer(op).tensor.dims[:1]}
        rules = (r for r in strategy.splits if experts & set(map(symbol, r.dims)))
        axes = {axis for rule in rules for axis in rule.over}
        b = module.before(op, by=GatherDimensions.name)
        for index, value in enumerate(op.operands):
            if value is _buffer(op):
                continue
            whole = placer.gathered(value.tensor, axes)
            if whole == placer.place(value.tensor.unplaced(), rest=False):
                continue
            if value not in pinned:
                pinned[value] = b.value(PIN, [value], type=whole, hint=value.name)
            op.set_operand(index, pinned[value])


def _buffer(op: Operation) -> Value:
    """The buffers of experts among the operands and results of an op."""
    values = (*op.operands, *op.results)
    return max(values, key=lambda v: v.tensor.rank)


def _concerned(module: Module, rule: GatherRule) -> dict[Operation, list[int]]:
    """The ops that treat a split of one of the dimensions specially, and the indices of the
    operands that have it."""
    concerned: dict[Operation, list[int]] = {}
    for name in rule.dims:
        ops = special_ops(module.main.body, name, None)
        if not ops:
            module.diagnostics.remark(
                f"no op needs {name} unsplit, so there is nothing to gather; to gather a value, "
                f"name it: stg.gather[{name}, of = ...]",
                rule.loc,
            )
        for op, operands in ops:
            before = concerned.get(op, [])
            concerned[op] = [*before, *(i for i in operands if i not in before)]
    return concerned
