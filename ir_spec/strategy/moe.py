"""How tokens get to the experts that a router chose, and back."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter


@dataclass(frozen=True)
class MoeRule(Record):
    """How tokens get to the experts that a router chose, and back."""

    dispatch: str = parameter(
        "name",
        "all_to_all: a copy for each expert; deepep: one for each node, and from there on",
        default="all_to_all",
        choices=("all_to_all", "deepep"),
        flag=Flag(
            "moe_dispatch",
            "Tokens go to their experts by an all-to-all, a copy for each expert, or once to each "
            "node and from there on (deepep).",
            default="all-to-all",
            needs=("ep",),
            rare=True,
        ),
    )


class MoeOp(Statement):
    """How tokens get to the experts that a router chose, and back.

    An `all_to_all` sends a copy of a token for each of the k experts that it takes. `deepep` sends
    one to each node that has some of them, from where it is forwarded inside the node; results of a
    node are added up before they go back (DeepEP, normal kernels; arXiv 2412.19437, section 3.2.2).
    How many nodes that are follows from k and, where the router takes experts of few groups
    (`top_groups` of `stg.route`), from their number. It changes seconds: traces have the bytes of
    an all-to-all either way.
    """

    name, record = "stg.moe", MoeRule
    section = Section.EXPERTS
    example = "stg.moe[dispatch = deepep]"
