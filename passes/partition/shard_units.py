"""shard-units: gathers of parameters outside of blocks become the units that the strategy says."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Builder, Module, Operation, Pass, Phase, Region, Value, const, read_strategy
from stagec.ir.rewrite import enclosing
from stagec.ir.traits import Repeats
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule
from stagec.sharding.gathers import gathers_of
from stagec.sharding.stages import accumulation, pipeline_rule


@dataclass(frozen=True)
class ShardUnits(Pass):
    """Drop and gather parameters outside of blocks as `stg.shard_units` says.

    With `outer = ends` what is gathered before the blocks is dropped behind its last use there and
    gathered again in backward, behind the blocks; what is gathered behind them is dropped when
    backward comes to the blocks. With `loss = inside` the gathers of the blocks
    are marked `beside_loss`, for the plan of memory. In a pipeline nothing happens.

    Before:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[loss = inside]
        }
        stg.func @f(%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %y = stg.repeat[count = L, carry = 1] (%h: bf16[B@dp, D] = %x, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp](%w) : bf16[D, D | rep]
            %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[B@dp, D]
            stg.yield(%a)
          } : bf16[B@dp, D]
          stg.return(%y)
        }
    After:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[loss = inside]
        }
        stg.func @f(%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %y = stg.repeat[count = L, carry = 1] (%h: bf16[B@dp, D] = %x, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[beside_loss, dim = 0, over = dp](%w) : bf16[D, D | rep]
            %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[B@dp, D]
            stg.yield(%a)
          } : bf16[B@dp, D]
          stg.return(%y)
        }
    """

    name = "shard-units"
    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return strategy.zero >= 3 and bool(strategy.all(ShardUnitsRule))

    def run(self, module: Module) -> None:
        rule, steps = read_strategy(module).one(ShardUnitsRule), accumulation(module)
        if steps is not None and pipeline_rule(steps) is not None:
            module.diagnostics.remark(
                "'stg.shard_units' changes nothing: pipeline stages gather parameters once, before "
                "their microbatches, and keep them",
                rule.loc,
            )
            return
        body = module.main.body if steps is None else steps.body
        if rule.loss == "inside":
            mark_gathers(body)
        if rule.outer == "ends":
            if read_strategy(module).reshard != "never":
                drop_before_blocks(module, body)
            drop_behind_blocks(module, body)


def mark_gathers(body: Region) -> None:
    """Mark the gathers of the last blocks of forward and of the first ones of backward, in
    place."""
    repeats = [op for op in body.ops if op.has(Repeats)]
    forward = [op for op in repeats if op.phase == "forward"]
    for op in (*forward[-1:], *[o for o in repeats if o.phase == "backward"][:1]):
        for gather in gathers_of(op.body):
            gather.attrs["beside_loss"] = True


def drop_before_blocks(module: Module, body: Region) -> None:
    """Drop what is gathered and used before the blocks, and gather it again behind their backward,
    in place."""
    repeats = [op for op in body.ops if op.has(Repeats)]
    first = next((op for op in repeats if op.phase == "forward"), None)
    last = next((op for op in reversed(repeats) if op.phase == "backward"), None)
    if first is None or last is None:
        return
    for gather in gathers_of(body):
        users = [enclosing(user, body) for user, _ in gather.result.uses]
        behind = max(users, key=Operation.position, default=None)
        if behind is None or behind.position() > first.position():
            continue
        gather.attrs["unit"] = const(1)
        Builder.after(module.registry, behind).op("stg.reshard", gather.results, types=())
        b = Builder.after(module.registry, last, loc=gather.loc, phase="backward")
        again = b.op(gather.name, gather.operands, gather.attrs, names=[gather.result.name])
        again.attrs["phase"] = "backward"


def drop_behind_blocks(module: Module, body: Region) -> None:
    """Drop what is gathered and used behind the blocks of forward, before backward comes to the
    blocks, in place."""
    repeats = [op for op in body.ops if op.has(Repeats)]
    first = next((op for op in repeats if op.phase == "forward"), None)
    back = next((op for op in repeats if op.phase == "backward"), None)
    if first is None or back is None:
        return
    values: list[Value] = []
    for gather in gathers_of(body):
        users = [enclosing(user, body).position() for user, _ in gather.result.uses]
        if users and min(users) > first.position() and max(users) < back.position():
            values += gather.results
    if values:
        before = Builder.before(module.registry, back, loc=values[0].loc, phase="backward")
        before.op("stg.reshard", values, types=())
