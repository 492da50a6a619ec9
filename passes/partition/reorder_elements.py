"""reorder-elements: adds the copies of collectives along dimensions other than the first."""

from stagec.api import Module, Operation, Pass, Phase, Value, read_strategy
from stagec.ir_spec.ops.comm import AllGather, AllSlice, ReduceScatter, operand_dim
from stagec.ir_spec.ops.layout import Gradient
from stagec.ir_spec.strategy.collectives import COPIED, CollectivesRule
from stagec.ir_spec.strategy.saved_tensors import SavedTensorsRule
from stagec.ir_spec.strategy.tp_inputs import TpInputsRule
from stagec.ir_spec.strategy.tp_outputs import TpOutputsRule
from stagec.sharding.gathers import is_of_parameter

_OF_ACTIVATIONS = ("forward", "backward", "recompute")


class ReorderElements(Pass):
    """Copy activations after gathers and before reductions along a dimension other than the first,
    as `stg.collectives[order = copied]` states. Also copy the part of a replicated gradient that an
    update takes. Parameters and other gradients are moved by calls of their own, and operands or
    results of products in steps are not copied, unless their collective blocks (`stg.blocking`).

    Before:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.collectives[order = copied]
        }
        stg.func @f(%x: bf16[B, S@tp, D], %z: bf16[B, S, D | sum(tp)]) {
          %x_g = stg.all_gather[dim = 1, over = tp](%x) : bf16[B, S, D | rep]
          %y = stg.gelu(%x_g) : bf16[B, S, D | rep]
          %z_s = stg.reduce_scatter[dim = 1, over = tp](%z) : bf16[B, S@tp, D]
          stg.return(%y, %z_s)
        }
    After:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.collectives[order = copied]
        }
        stg.func @f(%x: bf16[B, S@tp, D], %z: bf16[B, S, D | sum(tp)]) {
          %x_g = stg.all_gather[dim = 1, over = tp](%x) : bf16[B, S, D | rep]
          %x_g_o = stg.reorder(%x_g) : bf16[B, S, D | rep]
          %y = stg.gelu(%x_g_o) : bf16[B, S, D | rep]
          %z_o = stg.reorder(%z) : bf16[B, S, D | sum(tp)]
          %z_s = stg.reduce_scatter[dim = 1, over = tp](%z_o) : bf16[B, S@tp, D]
          stg.return(%y, %z_s)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(CollectivesRule).order == COPIED

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        gathers = strategy.one(TpInputsRule).gathers == "in_steps"
        sums = strategy.one(TpOutputsRule).policy == "in_steps"
        eager = strategy.one(SavedTensorsRule).until == "node"
        for func in module.functions:
            for op in list(func.body.walk()):
                if isinstance(op.definition, AllSlice) and op.phase == "optimizer":
                    _copy_part(module, op)
                if op.phase not in _OF_ACTIVATIONS or all(map(is_of_parameter, op.operands)):
                    continue
                blocks = set(op.names("over")) <= {*strategy.blocking}
                if isinstance(op.definition, AllGather) and (blocks or not gathers):
                    _copy_results(module, op, keep=eager)
                elif isinstance(op.definition, ReduceScatter) and (blocks or not sums):
                    _copy_operands(module, op, keep=eager)


def _copy_part(module: Module, part: Operation) -> None:
    """Copy the part of a replicated gradient that an update takes; the gradient stays."""
    named = [user for user, _ in part.result.uses]
    if len(named) != 1 or not isinstance(named[0].definition, Gradient):
        return
    b = module.before(part, phase="gradient")
    value, name = part.operands[0], named[0].result.name
    part.set_operand(0, b.op("stg.gradient", [value], types=[value.tensor], names=[name]).result)
    b = module.after(part)
    copy = b.value("stg.reorder", [part.result], hint=f"{part.result.name}_o")
    named[0].result.replace_with(copy)
    named[0].erase()


def _copy_results(module: Module, gather: Operation, *, keep: bool) -> None:
    """Copy the results of a gather, directly after it, and `keep` its operands until then, as
    `_copy_operands`."""
    b, copied = module.after(gather), list[Value]()
    for index, value in enumerate(gather.results):
        if operand_dim(gather, index):
            copied.append(gather.operands[index])
            value.replace_with(b.value("stg.reorder", [value], hint=f"{value.name}_o"))
    if copied and keep:
        b.op("stg.discard", copied, types=())


def _copy_operands(module: Module, reduction: Operation, *, keep: bool) -> None:
    """Copy the operands of a reduction, directly before it, and `keep` them until it ends, as the
    callers of eager code do (torch/distributed/tensor/_redistribute.py:
    `redistribute_local_tensor`)."""
    b, copied = module.before(reduction), list[Value]()
    for index, value in enumerate(reduction.operands):
        if operand_dim(reduction, index):
            copied.append(value)
            copy = b.value("stg.reorder", [value], hint=f"{value.name}_o")
            reduction.set_operand(index, copy)
    if copied and keep:
        module.after(reduction).op("stg.discard", copied, types=())
