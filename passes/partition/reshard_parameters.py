"""reshard-parameters: drops gathered parameters, unit by unit.

The parameters that one call gathers are a unit of FSDP (a block, or the root). They are resharded
together when all forward and backward ops of their region have run.
"""

from stagec.api import Module, Pass, Phase, Region, Value
from stagec.ir.traits import Terminates
from stagec.ir_spec.ops.layout import Reshard
from stagec.passes.partition.reshards import reshard_behind
from stagec.sharding.gathers import gathers_of


class ReshardParameters(Pass):
    """Drop the gathered parameters of a region, all results of a call together.

    Values that the region yields, or drops itself, stay.

    Before:
        stg.func @f(%x: bf16[B@dp, S, D], %v: bf16[D@dp, F | param], %w: bf16[F, D@dp | param]) {
          %v_g, %w_g = stg.all_gather[dim = (0, 1), over = dp](%v, %w) :
              (bf16[D, F | rep], bf16[F, D | rep])
          %y = stg.einsum["bsd,df->bsf"](%x, %v_g) : bf16[B@dp, S, F]
          %z = stg.einsum["bsf,fd->bsd"](%y, %w_g) : bf16[B@dp, S, D]
          stg.return(%z)
        }
    After:
        stg.func @f (%x: bf16[B@dp, S, D], %v: bf16[D@dp, F | param], %w: bf16[F, D@dp | param]) {
          %v_g, %w_g = stg.all_gather[dim = (0, 1), over = dp](%v, %w) :
              (bf16[D, F | rep], bf16[F, D | rep])
          %y = stg.einsum["bsd,df->bsf"](%x, %v_g) : bf16[B@dp, S, F]
          %z = stg.einsum["bsf,fd->bsd"](%y, %w_g) : bf16[B@dp, S, D]
          stg.reshard(%v_g, %w_g)
          stg.return(%z)
        }
    """

    needs = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        for func in module.functions:
            _reshard_units(module, func.body)


def _reshard_units(module: Module, region: Region) -> None:
    inner = [op.region for op in region.ops if op.region is not None]
    for op in gathers_of(region):
        reshard_behind(module, region, [r for r in op.results if not _is_handed_on(r)])
    for each in inner:
        _reshard_units(module, each)


def _is_handed_on(value: Value) -> bool:
    drops = (user.has(Terminates) or isinstance(user.definition, Reshard) for user, _ in value.uses)
    return any(drops)
