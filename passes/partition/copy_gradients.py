"""copy-gradients: gradients of a unit of ZeRO-3 are reduced in a buffer of their own."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Builder, Module, Operation, Pass, Phase, Value, read_strategy
from stagec.ir.traits import Recasts
from stagec.ir_spec.ops.comm import ReduceScatter
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule


@dataclass(frozen=True)
class CopyGradients(Pass):
    """Copy what one call of a unit reduces into its buffer, as `stg.shard_units[copies]` says.
    Casts for the reduction become part of the copy: gradients wait for it in their own type.

    Before:
        stg.mesh @pod[dp]
        stg.assume[D % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[copies]
        }
        stg.func @f(%v: bf16[D, F | sum(dp)], %w: bf16[D | sum(dp)]) {
          %v_f32 = stg.cast[f32](%v) : f32[D, F | sum(dp)]
          %w_f32 = stg.cast[f32](%w) : f32[D | sum(dp)]
          %v_s, %w_s = stg.reduce_scatter[dim = (0, 0), over = dp, phase = gradient](%v_f32, %w_f32)
              : (f32[D@dp, F], f32[D@dp])
          stg.return(%v_s, %w_s)
        }
    After:
        stg.mesh @pod[dp]
        stg.assume[D % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[copies]
        }
        stg.func @f(%v: bf16[D, F | sum(dp)], %w: bf16[D | sum(dp)]) {
          %v_c, %w_c = stg.copy_in[to = f32, phase = gradient](%v, %w)
              : (f32[D, F | sum(dp)], f32[D | sum(dp)])
          %v_s, %w_s = stg.reduce_scatter[dim = (0, 0), over = dp, phase = gradient](%v_c, %w_c)
              : (f32[D@dp, F], f32[D@dp])
          stg.return(%v_s, %w_s)
        }
    """

    name = "copy-gradients"
    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return strategy.zero >= 3 and strategy.one(ShardUnitsRule).copies

    def run(self, module: Module) -> None:
        for func in module.functions:
            for op in list(func.body.walk()):
                if isinstance(op.definition, ReduceScatter) and op.phase == "gradient":
                    copy_operands(module, op)


def copy_operands(module: Module, reduction: Operation) -> None:
    """Copy the operands of a reduction right before it, in its element type, in place."""
    builder = Builder.before(module.registry, reduction, loc=reduction.loc, phase="gradient")
    made = [_uncast(value) for value in reduction.operands]
    dtype = reduction.operands[0].tensor.dtype
    attrs = {"to": dtype} if any(v.tensor.dtype != dtype for v in made) else {}
    copies = builder.op("stg.copy_in", made, attrs, names=[f"{v.name}_c" for v in made])
    casts = [v.producer for v in reduction.operands]
    reduction.set_operands(copies.results)
    for cast in casts:
        if cast is not None and cast.has(Recasts) and not any(r.uses for r in cast.results):
            cast.erase()


def _uncast(value: Value) -> Value:
    """What was cast for a reduction, and for nothing else; else the value."""
    cast = value.producer
    alone = cast is not None and cast.has(Recasts) and len(list(value.uses)) == 1
    return cast.operands[0] if cast is not None and alone else value
