"""shard-parameters: splits parameters at rest over the axes of data parallelism (ZeRO)."""

from stagec.api import Module, Pass, Phase, Strategy, Value, axis_size, read_strategy
from stagec.ir_spec.strategy.shard_padding import ShardPaddingRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.padding import pad_parameter, padded_shard
from stagec.sharding.zero import Sharder


class ShardParameters(Pass):
    """Split parameters at rest as `stg.shard_params[zero = 3]` states, or stage 1 with `overlap`.

    At other stages the pass only assumes that the sizes of gradients and state divide. A remark
    names the parameters without a dimension that divides. With `stg.shard_padding` these are
    padded, and their users take a view without the padding.

    Before:
        stg.mesh @pod[dp]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
        }
        stg.func @f(%x: bf16[B, D | rep], %w: bf16[D, F | rep param]) -> bf16[B, D] {
          stg.return(%x)
        }
    After:
        stg.mesh @pod[dp]
        stg.assume[D % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
        }
        stg.func @f(%x: bf16[B, D | rep], %w: bf16[D@dp!2, F | param]) -> bf16[B, D] {
          stg.return(%x)
        }
    """

    needs = Phase.PLACED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).zero > 0

    def run(self, module: Module) -> None:
        shard_parameters(module, read_strategy(module))


def shard_parameters(module: Module, strategy: Strategy) -> None:
    """Split the parameters, in place.

    Raises `DiagnosticError` if more than 1% of their elements would not be split.
    """
    assumptions = Assumptions(module, ShardParameters.name, strategy.loc)
    sharder = Sharder(module, strategy, assumptions)
    at_rest = strategy.zero >= 3 or strategy.gathers_first
    params = module.parameters() if strategy.zero >= 3 else module.trainable()
    params = _without_padded(module, strategy, params, at_rest=at_rest)
    sharded = [(p, sharder.shard(p)) for p in params]
    sharder.check()
    if at_rest:
        for param, type_ in sharded:
            param.type = type_
    assumptions.check()


def _without_padded(
    module: Module, strategy: Strategy, params: list[Value], *, at_rest: bool
) -> list[Value]:
    """Pad parameters that do not divide over ranks, and shard them at rest. Returns the others."""
    rule, left = strategy.one(ShardPaddingRule).rule, list[Value]()
    counts = module.parameter_counts()
    for param in params:
        axes = tuple(a for a in strategy.zero_axes if a not in param.tensor.axes)
        known = rule != "none" and bool(axes)
        shard = padded_shard(param, axis_size(axes), module.env, rule) if known else None
        if shard is None:
            left.append(param)
        else:
            pad_parameter(module, param, shard, axes if at_rest else ())
            module.main.attrs.update(counts)
    return left
