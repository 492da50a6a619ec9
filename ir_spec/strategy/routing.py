"""How evenly routers load experts."""

from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

EVEN, SPREAD = "even", "spread"


class RoutingRule(Record):
    """How evenly routers load experts."""

    popularity: str = flagged(
        "expert_popularity",
        "Whether all experts are equally likely, or some are chosen more often (spread), so that "
        "few tokens reach fewer experts.",
        choices=(EVEN, SPREAD),
        needs=(EXPERTS,),
        rare=True,
        software=True,
    )


class RoutingOp(Statement):
    """How evenly routers load experts, which decides how many experts a number of tokens reaches.

    Of E experts, of which a token uses k, T tokens reach a share of 1 - (1 - k/E)^T on average if
    all experts are equally likely (`even`). With `spread`, the probability of an expert is itself
    distributed, by Beta(1, E/k - 1), whose mean is k/E: the mean share is then T k / (E + (T - 1)
    k), which is k/E for one token and approaches 1 for many, rounded up to whole bytes and experts.
    Of r ranks with n = E/r experts each, all wait for the one whose tokens reach most experts, so
    with `spread` its weights count: the mean of the largest of r binomial numbers over n. The
    number of rows per rank stays even. The statement has no effect in a model without experts, with
    a capacity, and in layers with `stg.expert_load`.
    """

    name, record = "stg.routing", RoutingRule
    section = Section.EXPERTS
    example = "stg.routing[popularity = spread]"
