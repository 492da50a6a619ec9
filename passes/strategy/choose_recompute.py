"""choose-recompute: writes on each repeat which values its backward recomputes."""

from dataclasses import replace

from stagec.api import Module, Operation, Pass, Phase, read_strategy
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.attention_base import AttentionOp
from stagec.ir_spec.strategy.recompute import MODULES, RECOMPUTE, RecomputeRule
from stagec.ir_spec.strategy.selective import SelectiveRule
from stagec.sharding.checkpoints import checkpoints
from stagec.sharding.recompute import recompute_attrs
from stagec.support.suggest import did_you_mean


class ChooseRecompute(Pass):
    """Write `stg.recompute` as attributes of the repeats to which it applies.

    `selective` becomes the list of ops that `stg.selective` states. 'differentiate' reads these
    attributes and removes them.

    Before:
        stg.strategy @s {
          stg.recompute[ops = gelu, layers = 2]
        }
        stg.func @f(%x: bf16[B, D]) {
          %y = stg.repeat[count = L] (%h: bf16[B, D] = %x) {
            %g = stg.gelu(%h) : bf16[B, D]
            stg.yield(%g)
          } : bf16[B, D]
          stg.return(%y)
        }
    After:
        stg.strategy @s {
          stg.recompute[ops = gelu, layers = 2]
        }
        stg.func @f(%x: bf16[B, D]) {
          %y = stg.repeat[count = L, recompute_ops = gelu, recompute_first = 2] (
            %h: bf16[B, D] = %x) {
            %g = stg.gelu(%h) : bf16[B, D]
            stg.yield(%g)
          } : bf16[B, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).recompute != RecomputeRule()

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        choose_recompute(module, strategy.recompute, strategy.one(SelectiveRule))


def choose_recompute(module: Module, what: RecomputeRule, selective: SelectiveRule) -> None:
    """Write the policy on all repeats, in place.

    Raises `DiagnosticError` for ops that no repeat contains.
    """
    repeats = [op for op in module.main.body.walk() if op.has(Repeats)]
    _check_ops(repeats, what)
    _check_modules(repeats, what)
    for op in repeats:
        op.attrs |= recompute_attrs(_listed(what, selective, op))


def _listed(what: RecomputeRule, selective: SelectiveRule, repeat: Operation) -> RecomputeRule:
    """The rule of a repeat, with `selective` replaced by the list of ops that it means there."""
    if what.policy != "selective" or what.modules or selective.what == "scores":
        return what
    attention = (op for op in repeat.body.ops if isinstance(op.definition, AttentionOp))
    fused = {op.name.partition(".")[2] for op in attention}
    if selective.what == "attention":
        return replace(what, modules=("core_attn",)) if fused else what
    keep = ("einsum", *sorted(fused))
    return replace(what, policy="full", keep=keep, products=2)


def _check_ops(repeats: list[Operation], what: RecomputeRule) -> None:
    """Raise `DiagnosticError` for names of ops that no repeat contains."""
    inside = (op for repeat in repeats for op in repeat.body.ops if op.definition.rule(op))
    known = sorted({op.name.partition(".")[2] for op in inside})
    for name in (*what.ops, *what.keep):
        if name not in known:
            raise what.error(
                f"no block of the model has an op '{name}' to recompute or keep",
                remedy=did_you_mean(name, (*RECOMPUTE, *known))
                or f"choose {', '.join(RECOMPUTE)}, or ops among {', '.join(known)}",
            )


def _check_modules(repeats: list[Operation], what: RecomputeRule) -> None:
    """Raise `DiagnosticError` for modules that no repeat contains."""
    for name in what.modules:
        if not any(checkpoints(op.body, [name]) for op in repeats):
            known = [n for n in MODULES if any(checkpoints(op.body, [n]) for op in repeats)]
            raise what.error(
                f"no block of the model has a module '{name}' to recompute",
                remedy=f"choose among {', '.join(known)}" if known else "choose --recompute full",
            )
