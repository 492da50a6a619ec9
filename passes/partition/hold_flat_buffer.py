"""hold-flat-buffer: adds the buffer into which ZeRO copies gradients that it reduces."""

from dataclasses import replace

from stagec.api import (
    Dim,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    TensorType,
    call,
    const,
    evaluate,
    read_strategy,
    total,
)
from stagec.ir.rewrite import enclosing
from stagec.ir.traits import Accumulates
from stagec.ir_spec.strategy.dtypes import on_the_wire
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.models import is_shipped
from stagec.sharding.gathers import is_of_parameter
from stagec.sharding.stages import accumulation, stage_functions
from stagec.sharding.work import is_product


class HoldFlatBuffer(Pass):
    """Add the buffer of `stg.gradients[flat]` elements, in the type in which gradients are reduced.
    Under ZeRO-1 it is there from the first gradient of a parameter to the end of the last backward,
    under ZeRO-2 in the backward of each microbatch, beside a copy of the gradients in it that ranks
    reduce, and under ZeRO-3 across steps. If all gradients have room, they are copied at the end of
    backward. With two buffers (`overlap_comm`) ZeRO-1 copies too. In pipeline stages and
    without ZeRO nothing happens.

    Before:
        stg.symbols[B, D]
        stg.mesh @pod[dp]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 2]
          stg.gradients[flat = 1000]
        }
        stg.func @f(%x: bf16[B@dp, D], %w: bf16[D, D | rep param]) -> bf16[B@dp, D] {
          %y = stg.einsum["bd,de->be"](%x, %w) : bf16[B@dp, D]
          %d = stg.einsum["bd,ed->be", phase = backward](%y, %w) : bf16[B@dp, D]
          stg.return(%d)
        }
    After:
        stg.symbols[B, D]
        stg.mesh @pod[dp]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 2]
          stg.gradients[flat = 1000]
        }
        stg.func @f(%x: bf16[B@dp, D], %w: bf16[D, D | rep param]) -> bf16[B@dp, D] {
          %y = stg.einsum["bd,de->be"](%x, %w) : bf16[B@dp, D]
          %flat = stg.workspace[phase = backward] : f32[1000 | rep]
          %flat_copy = stg.workspace[phase = backward] : f32[min(D^2, 1000) | rep]
          %d = stg.einsum["bd,ed->be", phase = backward](%y, %w) : bf16[B@dp, D]
          stg.discard[phase = backward](%flat, %flat_copy)
          stg.return(%d)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return bool(strategy.one(GradientsRule).flat) and strategy.zero > 0

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        rule = strategy.one(GradientsRule)
        elements, staged = const(rule.flat), bool(stage_functions(module))
        idle = "'flat' of 'stg.gradients' changes nothing in stages of a pipeline" if staged else ""
        if not staged and strategy.zero == 3 and rule.flat_buffers > 1:
            idle = "'flat_buffers' of 'stg.gradients' changes nothing under ZeRO-3"
        if idle and not is_shipped(rule.loc):
            module.diagnostics.remark(idle, rule.loc)
        if staged:
            return
        for func in module.functions:
            trained = [a for a in func.body.args if a.tensor.role == "param"]
            if not trained or all(op.phase != "backward" for op in func.body.walk()):
                continue
            wire = on_the_wire(strategy.dtypes, strategy.zero, trained[0].tensor.dtype)
            type_ = _flat(wire, elements)
            if strategy.zero == 3:
                func.body.add_arg("flat", replace(type_, role="bucket"), func.loc)
                continue
            whole = total(a.tensor.local_elements for a in trained)
            copy = _flat(wire, call("min", [elements, whole]))
            known = whole.symbols <= module.env.keys()
            once = known and evaluate(whole, module.env) <= rule.flat
            copies = rule.flat_buffers > 1 or strategy.zero == 2
            buffers = [type_] * rule.flat_buffers
            each = strategy.zero == 2  # in each microbatch
            _hold(module, func, buffers, copy if copies else None, each=each, once=once)


def _flat(dtype: str, elements: Expr) -> TensorType:
    return TensorType(dtype, (Dim(elements),), placed=True)


def _hold(
    module: Module,
    func: Operation,
    buffers: list[TensorType],
    copy: TensorType | None,
    *,
    each: bool,
    once: bool,
) -> None:
    """Add tensors that exist from the first gradient of a parameter, whose hook makes them
    (`process_gradients`), in place: in `each` microbatch, or to the end of all. With `once` the
    copy is made when all gradients are there."""
    steps = accumulation(func)
    region = steps.body if each and steps is not None else func.body
    ops = [op for op in func.body.walk() if op.phase == "backward"]
    back = [enclosing(op, region) for op in ops]
    first, last = (each(back, key=Operation.position) for each in (min, max))
    phase = "forward" if first.has(Accumulates) else "backward"  # of the first microbatch
    made_by = next((op for op in ops if _makes_gradient(op)), first)
    inside = made_by is not first and enclosing(made_by, region) is made_by
    place = module.after if inside else module.before
    b = place(made_by if inside else first, loc=func.loc, phase=phase)
    end = module.after(last, loc=func.loc, phase="backward")
    names = ("flat", "flat_2")
    made = [b.value("stg.workspace", type=t, hint=n) for t, n in zip(buffers, names, strict=False)]
    if copy is not None:
        made.append((end if once else b).value("stg.workspace", type=copy, hint="flat_copy"))
    end.op("stg.discard", made, types=())


def _makes_gradient(op: Operation) -> bool:
    """Whether a product makes the gradient of a parameter: it reads none."""
    return is_product(op) and not any(map(is_of_parameter, op.operands))
