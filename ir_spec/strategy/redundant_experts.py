"""The statement of copies of experts, which servers keep of those that many tokens choose."""

from __future__ import annotations

from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Statement, flagged


class CopiesRule(Record):
    """How many experts are held twice."""

    count: int = flagged(
        "redundant_experts",
        "With --serve: this many copies of popular experts, in addition to the model's experts.",
        "int",
        least=0,
        needs=(EXPERTS,),
        rare=True,
    )


class CopiesOp(Statement):
    """Ranks hold copies of some experts, so that many tokens for one expert go to several ranks
    (DeepSeek's expert parallelism load balancer; arXiv 2412.19437, section 3.4). E counts all that
    are held, of which a rank has E/ep; routers choose among the others. The load is even over all.
    """

    name, record = "stg.redundant_experts", CopiesRule
    example = "stg.redundant_experts[count = 32]"
