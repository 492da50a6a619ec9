"""keep-reductions: keeps what split products add up where backward computes the rest again."""

from dataclasses import replace

from stagec.api import Dim, Module, Operation, Pass, Phase, axis_size, read_strategy
from stagec.ir.rewrite import slice_into, stacked_outside
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.comm import ReduceScatter
from stagec.ir_spec.ops.ring import AttentionBlock
from stagec.ir_spec.strategy.fusion import FusionRule
from stagec.ir_spec.strategy.kernels import KernelsRule
from stagec.ir_spec.strategy.selective import SelectiveRule


class KeepReductions(Pass):
    """Keep the results of reduce_scatters of activations in forward of blocks for their backward,
    which then computes neither these nor their operands again, under `stg.recompute[selective]`
    with `stg.selective[products]`: torchtitan's `_save_list` has them. Those that backward does not
    need are kept until its block ends, except by a compiler of blocks (`stg.fusion[elementwise]`).
    The list has kernels of attention too, so of eager ring attention (`stg.kernels[ring]`) it keeps
    what each step returns until the block is computed again.
    Blocks of pipeline stages compute them again.

    Before:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, D % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.recompute[selective]
          stg.selective[products]
        }
        stg.func @f (
            %a: bf16[L, S, D@tp], %w: bf16[D@tp, D], %d: bf16[L, S@tp, D]) ->
            (bf16[L, S@tp, D], bf16[L, S@tp, D]) {
          %y, %as = stg.repeat[count = L, carry = 0] (%b: bf16[S, D@tp] = %a) {
            %c = stg.einsum["sd,de->se"](%b, %w) : bf16[S, D | sum(tp)]
            %r = stg.reduce_scatter[dim = 0, over = tp](%c) : bf16[S@tp, D]
            %z = stg.gelu(%r) : bf16[S@tp, D]
            stg.yield(%z, %b)
          } : (bf16[L, S@tp, D], bf16[L, S, D@tp])
          %g = stg.repeat[reverse, count = L, carry = 0, phase = backward] (
              %b: bf16[S, D@tp] = %as, %e: bf16[S@tp, D] = %d) {
            %c = stg.einsum["sd,de->se", phase = recompute](%b, %w) : bf16[S, D | sum(tp)]
            %r = stg.reduce_scatter[dim = 0, over = tp, phase = recompute](%c) : bf16[S@tp, D]
            %h = stg.gelu_grad(%e, %r) : bf16[S@tp, D]
            stg.yield(%h)
          } : bf16[L, S@tp, D]
          stg.return(%y, %g)
        }
    After:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, D % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.recompute[selective]
          stg.selective[products]
        }
        stg.func @f (
            %a: bf16[L, S, D@tp], %w: bf16[D@tp, D], %d: bf16[L, S@tp, D]) ->
            (bf16[L, S@tp, D], bf16[L, S@tp, D]) {
          %y, %as, %r_kept = stg.repeat[count = L, carry = 0] (%b: bf16[S, D@tp] = %a) {
            %c = stg.einsum["sd,de->se"](%b, %w) : bf16[S, D | sum(tp)]
            %r = stg.reduce_scatter[dim = 0, over = tp](%c) : bf16[S@tp, D]
            %z = stg.gelu(%r) : bf16[S@tp, D]
            stg.yield(%z, %b, %r)
          } : (bf16[L, S@tp, D], bf16[L, S, D@tp], bf16[L, S@tp, D])
          %g = stg.repeat[reverse, count = L, carry = 0, phase = backward] (
              %b: bf16[S, D@tp] = %as, %e: bf16[S@tp, D] = %d, %r_kept_i: bf16[S@tp, D] = %r_kept) {
            %c = stg.einsum["sd,de->se", phase = recompute](%b, %w) : bf16[S, D | sum(tp)]
            %h = stg.gelu_grad(%e, %r_kept_i) : bf16[S@tp, D]
            stg.yield(%h)
          } : bf16[L, S@tp, D]
          stg.return(%y, %g)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        listed = strategy.one(SelectiveRule).what == "products"
        return listed and strategy.recompute.policy == "selective"

    def run(self, module: Module) -> None:
        eager = read_strategy(module).one(KernelsRule).ring != "fused"
        for func in module.functions:
            repeats = [op for op in func.body.walk() if op.has(Repeats)]
            for back in repeats:
                if any(op.phase == "recompute" for op in back.body.ops):
                    for forward in repeats:
                        if forward.parent is back.parent and {*forward.results} & {*back.operands}:
                            _keep(module, forward, back)
                            if eager:
                                _keep_steps(module, forward, back)


def _keep(module: Module, forward: Operation, back: Operation) -> None:
    """Hand the reduced activations of the forward of blocks to their backward, in place."""
    again = {op.result.name: op for op in _reductions(back, "recompute")}
    compiled = read_strategy(module).one(FusionRule).kind == "elementwise"
    for op in _reductions(forward, "forward"):
        twin = again.get(op.result.name)
        if twin is None and compiled:
            continue
        kept = slice_into(back, stacked_outside([op.result])[0])
        if twin is not None:
            twin.result.replace_with(kept)
            twin.erase()
        else:
            end = module.before(back.body.terminator, phase="backward")
            end.op("stg.discard", [kept], types=())


def _keep_steps(module: Module, forward: Operation, back: Operation) -> None:
    """Keep what the steps of eager ring attention return, beside the first, until the block is
    computed again, in place."""
    for op in [op for op in forward.body.ops if isinstance(op.definition, AttentionBlock)]:
        if op.phase != "forward" or not op.flag("home"):
            continue
        steps = axis_size(op.names("over")) - 1
        halved = op.text("order") == "zigzag" and op.flag("causal")
        for value, dim in zip(op.results, (1, 2), strict=True):
            dims = [Dim(d.local) for d in value.tensor.dims]
            dims[dim] = Dim(dims[dim].size / (2 if halved else 1) * steps)
            type_ = replace(value.tensor, dims=tuple(dims), placed=True)
            b = module.after(op, loc=op.loc, phase="forward")
            made = b.value("stg.workspace", type=type_, hint=f"{value.name}_steps")
            kept = slice_into(back, stacked_outside([made])[0])
            first = module.before(back.body.ops[0], loc=op.loc, phase="recompute")
            first.op("stg.discard", [kept], types=())


def _reductions(repeat: Operation, phase: str) -> list[Operation]:
    of_phase = (op for op in repeat.body.ops if op.phase == phase and len(op.results) == 1)
    return [op for op in of_phase if isinstance(op.definition, ReduceScatter)]
