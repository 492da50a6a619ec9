"""How alike routers load experts."""

from __future__ import annotations

from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

EVEN, SPREAD = "even", "spread"


class RoutingRule(Record):
    """How alike routers load experts."""

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

    Of E experts, of which a token takes k, T tokens reach the share 1 - (1 - k/E)^T on average if
    all are as likely (`even`). With `spread` the probability of an expert is itself distributed, by
    Beta(1, E/k - 1), whose mean is k/E: the mean share is then T k / (E + (T - 1) k), which is k/E
    for one token and 1 for many, rounded up to whole bytes and experts. Of r ranks with n = E/r
    experts each, all wait for the one that reaches most, so with `spread` its weights count: the
    mean of the largest of r binomial numbers over n. Rows of ranks stay even. A model without
    experts, buffers with a capacity and layers with `stg.expert_load` have no use for it.
    """

    name, record = "stg.routing", RoutingRule
    section = Section.EXPERTS
    example = "stg.routing[popularity = spread]"
