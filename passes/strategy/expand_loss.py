"""expand-loss: a cross entropy becomes a log-softmax and the loss by it."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Builder, Module, Operation, Pass, Phase, Strategy, made_by, read_strategy
from stagec.ir.rewrite import replace_op
from stagec.ir_spec.ops.vocabulary import CrossEntropy
from stagec.ir_spec.strategy.loss import LossRule


@dataclass(frozen=True)
class ExpandLoss(Pass):
    """Replace each cross entropy by the ops of PyTorch without a compiler, as `stg.loss` says.

    The log-softmax is what backward needs, not the logits. One whose vocabulary is split stays.

    Before:
        stg.strategy @s {
          stg.loss[form = stock]
        }
        stg.func @f(%z: f32[B, S, V], %y: i32[B, S]) -> f32[] {
          %l = stg.cross_entropy[mean = B*S](%z, %y) : f32[]
          stg.return(%l)
        }
    After:
        stg.strategy @s {
          stg.loss[form = stock]
        }
        stg.func @f(%z: f32[B, S, V], %y: i32[B, S]) -> f32[] {
          %z_logp = stg.log_softmax(%z) : f32[B, S, V]
          %l = stg.nll_loss[mean = B*S](%z_logp, %y) : f32[]
          stg.return(%l)
        }
    """

    name = "expand-loss"
    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(LossRule).form == "stock"

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        losses = [op for op in module.main.body.walk() if isinstance(op.definition, CrossEntropy)]
        whole = [op for op in losses if not _is_split(module, strategy, op)]
        for op in whole:
            expand_loss(module, op)
        if not whole:
            why = "the vocabulary is split" if losses else "there is no cross entropy"
            remark = f"'stg.loss[stock]' changes nothing: {why}"
            module.diagnostics.remark(remark, strategy.one(LossRule).loc)


def expand_loss(module: Module, op: Operation) -> None:
    """Replace one cross entropy, in place."""
    logits, labels = op.operands
    b = Builder.before(module.registry, op, loc=made_by(ExpandLoss.name, op.loc))
    logp = b.value("stg.log_softmax", [logits], hint=f"{logits.name}_logp")
    loss = b.value("stg.nll_loss", [logp, labels], {"mean": op.expr("mean")}, hint=op.result.name)
    replace_op(op, [loss])


def _is_split(module: Module, strategy: Strategy, op: Operation) -> bool:
    """Whether the strategy splits the vocabulary of a loss."""
    names = op.operands[0].tensor.dims[-1].size.symbols
    mesh = module.mesh
    rules = (rule for rule in strategy.splits if names & {*rule.dims})
    return mesh is not None and any(mesh.sizes.get(a) != 1 for rule in rules for a in rule.over)
