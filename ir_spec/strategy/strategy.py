"""`stg.strategy`: the container of the statements of a strategy."""

from stagec.ir.param import Param
from stagec.ir.traits import Declares, Holds
from stagec.ir_spec.ops.structure import Declaration


class StrategyOp(Declaration):
    """A parallelization strategy: statements that `apply-strategy` turns into placements."""

    name = "stg.strategy"
    traits = (Declares("strategy"), Holds("statements such as stg.split[B, over = dp]"))
    parents = ("stg.module",)
    params = (Param("mesh", "symbol", "the mesh that it is for"),)
    example = "stg.strategy @s[mesh = @pod] {\n  stg.split[B, over = dp]\n}"
