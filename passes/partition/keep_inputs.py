"""keep-inputs: keeps inputs of split products until the output of their module is complete."""

from stagec.api import Module, Pass, Phase, Region, Value, read_strategy
from stagec.ir_spec.ops.comm import AllGather, AllReduce, ReduceScatter, Reorder
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.strategy.tp_inputs import TpInputsRule
from stagec.sharding.gathers import is_of_parameter


class KeepInputs(Pass):
    """Keep inputs of split products, gathered and before, in forward and where backward computes it
    again, until the reduction or the gather of the result computed from them, and other inputs of a
    product until its own reduction, as `stg.tp_inputs[until = module]` states.

    Before:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, F % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.tp_inputs[save_gathered, until = module]
        }
        stg.func @f(%x: bf16[B, S@tp, D], %v: bf16[D, F@tp], %w: bf16[F@tp, D]) {
          %x_g = stg.all_gather[dim = 1, over = tp](%x) : bf16[B, S, D | rep]
          %y = stg.einsum["bsd,df->bsf"](%x_g, %v) : bf16[B, S, F@tp]
          %z = stg.einsum["bsf,fd->bsd"](%y, %w) : bf16[B, S, D | sum(tp)]
          %z_s = stg.reduce_scatter[dim = 1, over = tp](%z) : bf16[B, S@tp, D]
          stg.return(%z_s)
        }
    After:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, F % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.tp_inputs[save_gathered, until = module]
        }
        stg.func @f(%x: bf16[B, S@tp, D], %v: bf16[D, F@tp], %w: bf16[F@tp, D]) {
          %x_g = stg.all_gather[dim = 1, over = tp](%x) : bf16[B, S, D | rep]
          %y = stg.einsum["bsd,df->bsf"](%x_g, %v) : bf16[B, S, F@tp]
          %z = stg.einsum["bsf,fd->bsd"](%y, %w) : bf16[B, S, D | sum(tp)]
          %z_s = stg.reduce_scatter[dim = 1, over = tp](%z) : bf16[B, S@tp, D]
          stg.discard(%x_g, %x, %y)
          stg.return(%z_s)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(TpInputsRule).until == "module"

    def run(self, module: Module) -> None:
        for func in module.functions:
            for region in {op.parent: None for op in func.body.walk() if op.parent is not None}:
                for phase in ("forward", "recompute"):
                    _keep_inputs(module, region, phase)


def _keep_inputs(module: Module, region: Region, phase: str) -> None:
    """In a phase of a region, keep the inputs of what each reduction or gather over ranks takes
    until it ends."""
    gathered: dict[Value, set[Value]] = {}  # and the values computed from it
    for op in [op for op in region.ops if op.phase == phase]:
        for known in gathered.values():
            if not known.isdisjoint(op.reads()):
                known |= {*op.results}
        moves = isinstance(op.definition, AllGather) and not any(map(is_of_parameter, op.operands))
        if moves or isinstance(op.definition, AllReduce | ReduceScatter):
            ready = [v for v, known in gathered.items() if not known.isdisjoint(op.operands)]
            inputs = [] if moves else [v for x in op.operands for v in _inputs(x)]
            kept = dict.fromkeys([*ready, *inputs])
            gathered = {v: known for v, known in gathered.items() if v not in kept}
            if kept:
                end = _copied(op.results[0]).producer or op
                module.after(end).op("stg.discard", [*kept], types=())
        for value, result in zip(op.operands, op.results, strict=True) if moves else ():
            copy = _copied(result)
            gathered |= {copy: {copy}, value: {copy}}


def _copied(value: Value) -> Value:
    """A value, or its copy if that is the only user."""
    users = [user for user, _ in value.uses]
    alone = len(users) == 1 and isinstance(users[0].definition, Reorder)
    return users[0].result if alone else value


def _inputs(value: Value) -> list[Value]:
    """The activations among the operands of the product that makes a value, which may be copied."""
    op = value.producer
    if op is not None and isinstance(op.definition, Reorder):
        return _inputs(op.operands[0])
    if op is None or not isinstance(op.definition, Einsum):
        return []
    return [v for v in op.operands if v.producer is not None and not is_of_parameter(v)]
