"""expand-loss: replaces a cross entropy by the ops that software runs for it."""

from stagec.api import Module, Operation, Pass, Phase, Strategy, read_strategy
from stagec.ir.opdef import LossForm
from stagec.ir.rewrite import erase_unused, replace_op
from stagec.ir_spec.strategy.loss import LossRule


class ExpandLoss(Pass):
    """Replace each loss of the next tokens by the ops of a form of `stg.loss`, which its op
    defines.

    In the form `stock` backward needs the log-softmax, not the logits.

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

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(LossRule).form != "fused"

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        rule = strategy.one(LossRule)
        every = list(module.main.body.walk())
        losses = [op for op in every if op.definition.logits(op) is not None]
        if not [op for op in losses if expand_loss(module, strategy, op)]:
            split = any(_is_split(module, strategy, op) for op in losses)
            why = "the vocabulary is split" if split else "no product makes the logits"
            why = why if losses else "there is no cross entropy"
            module.diagnostics.remark(f"'stg.loss[{rule.form}]' changes nothing: {why}", rule.loc)


def expand_loss(module: Module, strategy: Strategy, op: Operation) -> bool:
    """Replace one loss by the form of the strategy, in place. Returns whether it has that form."""
    rule = strategy.one(LossRule)
    form = LossForm(rule.form, rule.chunks, _is_split(module, strategy, op))
    loss = op.definition.expanded(module.before(op, by=ExpandLoss.name), op, form)
    if loss is None:
        return False
    if loss is not op.result:
        loss.name = op.result.name
        replace_op(op, [loss])
        erase_unused(module.main.body)  # the head, or a cast, inside of the loss
    return True


def _is_split(module: Module, strategy: Strategy, op: Operation) -> bool:
    """Whether the strategy splits the vocabulary of a loss, and leaves it split."""
    if strategy.one(LossRule).logits == "gathered":
        return False
    logits = op.definition.logits(op)
    names = logits.tensor.dims[-1].size.symbols if logits is not None else frozenset[str]()
    mesh = module.mesh
    rules = (rule for rule in strategy.splits if names & {*rule.dims})
    return mesh is not None and any(mesh.sizes.get(a) != 1 for rule in rules for a in rule.over)
