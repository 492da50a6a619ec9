"""hoist-reductions: reduces gradients over tensor-parallel ranks once per step.

Under ZeRO-2 and 3 the gradient of a layer is reduced over data-parallel ranks as soon as it is
complete. The gradient of a parameter that is replicated over tensor-parallel ranks (a norm under
sequence parallelism, a router) is a partial sum over these as well. Nothing needs this sum before
the optimizer. Inside of the layer it would wait for the reduction over data-parallel ranks, and the
activations of the next layer would wait for it.

Megatron-LM does the same: `finalize_model_grads` first ends the data-parallel reductions, then sums
the gradients of norms over tensor-parallel ranks in one call.
"""

from collections.abc import Sequence
from dataclasses import replace

from stagec.api import (
    Builder,
    Module,
    Operation,
    Partial,
    Pass,
    Phase,
    TensorType,
    Value,
    read_strategy,
)
from stagec.ir.rewrite import carried
from stagec.ir.traits import Accumulates, FinalGradient, Recasts, Repeats, Terminates
from stagec.ir_spec.ops.comm import AllReduce


class HoistReductions(Pass):
    """Move the sums of gradients over axes that split other parameters behind the loops over layers
    and microbatches.

    The sums in the iterations of a loop have the same axes, so they become one sum of the result
    that the loop stacks or adds up. Reductions over axes of ZeRO, and over those that split no
    parameter, are not moved.

    Before:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 2]
        }
        stg.func @f(%d: f32[L, D | sum(dp, tp)], %v: f32[D, F@tp | param]) -> f32[L, D@dp] {
          %g = stg.repeat[count = L, carry = 0, phase = backward] (%e: f32[D | sum(dp, tp)] = %d) {
            %e_s = stg.reduce_scatter[dim = 0, over = dp, phase = gradient](%e) :
                f32[D@dp | sum(tp)]
            %e_r = stg.all_reduce[over = tp, phase = gradient](%e_s) : f32[D@dp]
            %g_w = stg.gradient[phase = gradient](%e_r) : f32[D@dp]
            stg.yield(%g_w)
          } : f32[L, D@dp]
          stg.return(%g)
        }
    After:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 2]
        }
        stg.func @f(%d: f32[L, D | sum(dp, tp)], %v: f32[D, F@tp | param]) -> f32[L, D@dp] {
          %g = stg.repeat[count = L, carry = 0, phase = backward] (%e: f32[D | sum(dp, tp)] = %d) {
            %e_s = stg.reduce_scatter[dim = 0, over = dp, phase = gradient](%e) :
                f32[D@dp | sum(tp)]
            stg.yield(%e_s)
          } : f32[L, D@dp | sum(tp)]
          %g_r = stg.all_reduce[over = tp, phase = gradient](%g) : f32[L, D@dp]
          %g_w = stg.gradient[phase = gradient](%g_r) : f32[L, D@dp]
          stg.return(%g_w)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).zero >= 2

    def run(self, module: Module) -> None:
        hoist_reductions(module)


def hoist_reductions(module: Module) -> None:
    """Move the sums of gradients over axes of tensor parallelism out of loops, in place."""
    zero = read_strategy(module).zero_axes
    split = {a for p in module.parameters() for d in p.tensor.dims for a in d.axes if a not in zero}
    last: dict[Operation, Operation] = {}
    for final in [op for op in module.walk() if op.has(FinalGradient)]:
        reduction = final.operands[0].producer
        if reduction is None or not isinstance(reduction.definition, AllReduce):
            continue
        over = tuple(a for a in reduction.names("over") if a in split)
        way = _way_out(final)
        loop = way[-1].producer if way else None
        if over and loop is not None and _only_user(reduction.result) is not None:
            made = _reduce_outside(module, way[-1], final, over, last.get(loop, loop))
            last[loop] = made
            _leave_partial(final, reduction, over, way)


def _way_out(op: Operation) -> list[Value]:
    """The values through which a gradient leaves the loops around it: results of casts and of
    loops, outermost last. Empty if anything else uses it."""
    way: list[Value] = []
    left = 0
    value = op.result
    while (use := _only_user(value)) is not None:
        user, index = use
        owner = user.parent_op
        if user.has(Recasts) and user.parent is value.region:
            value = user.result
        elif user.has(Terminates) and owner is not None and _hands_on(owner, index):
            value = owner.results[index]
            left = len(way) + 1
        else:
            break
        way.append(value)
    return way[:left]


def _hands_on(loop: Operation, index: int) -> bool:
    """Whether a loop stacks or adds up the value that it yields at `index`; both are linear."""
    return loop.has(Accumulates) or (loop.has(Repeats) and index >= carried(loop))


def _only_user(value: Value) -> tuple[Operation, int] | None:
    return value.uses[0] if len(value.uses) == 1 else None


def _reduce_outside(
    module: Module, value: Value, final: Operation, over: tuple[str, ...], last: Operation
) -> Operation:
    """Reduce the result of a loop behind `last`, for all of its users, in the type in which the
    gradient was reduced. Returns the last op made."""
    users, whole = list(value.uses), value.tensor
    sent = replace(whole, dtype=final.result.tensor.dtype)
    b = module.after(last, loc=final.loc, by=HoistReductions.name, phase="gradient")
    ready = _cast(b, value, replace(sent, partial=_partial(whole, over)))
    summed = b.value("stg.all_reduce", [ready], {"over": over}, type=sent, hint=f"{value.name}_r")
    marked = b.value("stg.gradient", [summed], type=sent, hint=final.result.name)
    result = _cast(b, marked, whole)
    value.replace_with(result, users)
    made = result.producer
    return last if made is None else made


def _leave_partial(
    final: Operation, reduction: Operation, over: tuple[str, ...], way: Sequence[Value]
) -> None:
    """Leave the gradient a partial sum over these axes."""
    rest = tuple(a for a in reduction.names("over") if a not in over)
    for value in (reduction.result, *way):
        value.type = replace(value.tensor, partial=_partial(value.tensor, over))
    reduction.attrs["over"] = rest
    final.result.replace_with(reduction.result if rest else reduction.operands[0])
    final.erase()
    if not rest:
        reduction.erase()


def _partial(type_: TensorType, over: tuple[str, ...]) -> Partial:
    return Partial("sum", (*type_.partial_axes, *over))


def _cast(b: Builder, value: Value, to: TensorType) -> Value:
    if value.tensor.dtype == to.dtype:
        return value
    return b.value("stg.cast", [value], {"to": to.dtype}, type=to, hint=f"{value.name}_{to.dtype}")
