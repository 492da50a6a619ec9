"""The statement of redundant experts: servers keep copies of experts that many tokens choose."""

from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Statement, flagged


class CopiesRule(Record):
    """The number of copies of experts."""

    count: int = flagged(
        "redundant_experts",
        "With --serve: this many copies of popular experts, in addition to the model's experts.",
        "int",
        least=0,
        needs=(EXPERTS,),
        rare=True,
    )


class CopiesOp(Statement):
    """Ranks have copies of some experts, so that the tokens of a popular expert go to several ranks
    (DeepSeek's expert parallelism load balancer; arXiv 2412.19437, section 3.4). E becomes the
    number with copies, and a rank has E/ep of all; routers choose among the experts of the model,
    in its groups. The load is even over all.
    """

    name, record = "stg.redundant_experts", CopiesRule
    example = "stg.redundant_experts[count = 32]"
