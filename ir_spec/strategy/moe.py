"""How tokens get to the experts that a router chose, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.ir_spec.strategy.statement import (
    Flag,
    FlagValues,
    Record,
    Section,
    Statement,
    parameter,
)


@dataclass(frozen=True)
class MoeRule(Record):
    """How tokens get to the experts that a router chose, and back."""

    dispatch: str = parameter(
        "name",
        "all_to_all: a copy for each expert; deepep: one for each node, and there for each rank",
        default="all_to_all",
        choices=("all_to_all", "deepep"),
        flag=Flag(
            "moe_dispatch",
            "Tokens go to their experts by an all-to-all, a copy for each expert, or once to each "
            "node and there to each rank (deepep).",
            default="all-to-all",
            needs=("ep",),
            rare=True,
        ),
    )
    payload: str = parameter(
        "name",
        "products: tokens are sent in the type of the products behind, if that is smaller; "
        "tokens: in their own",
        default="products",
        choices=("products", "tokens"),
        flag=Flag(
            "moe_payload",
            "Tokens are sent in the element type of the products of experts, cast before (products)"
            ", or in their own, cast where they arrive (tokens).",
            needs=("ep",),
            rare=True,
        ),
    )
    sort: bool = parameter(
        "flag",
        "rows that came by an all-to-all are copied into the order of their experts, and back",
        flag=Flag(
            "moe_sort",
            "Rows that an all-to-all brought from several ranks are copied into the order of their "
            "experts, and results back into that of the ranks.",
            needs=("ep",),
            rare=True,
        ),
    )


class MoeOp(Statement):
    """How tokens get to the experts that a router chose, and back.

    An `all_to_all` sends a copy of a token for each of the k experts that it takes. `deepep` sends
    one to each node that has some of them, from where one is forwarded to each such rank of the
    node; results of a rank and of a node are added up before they go back (DeepEP, normal kernels,
    and HybridEP of Megatron-Core; arXiv 2412.19437, section 3.2.2). How many nodes that are follows
    from k and, where the router takes experts of few groups (`top_groups` of `stg.route`), from
    their number. It changes seconds: traces have the bytes of an all-to-all either way.

    Tokens that products take in 8 or 4 bits are cast before they are sent, as in DeepSeek-V3; with
    `payload = tokens` behind, as by Megatron-Core, whose dispatcher knows nothing of 8 bits.

    What an all-to-all brings is in the order of the ranks that sent it. With `sort` a kernel of its
    own copies it into that of the experts, where a rank has several, and another one copies their
    results back (`sort-expert-rows`), forward and backward. `deepep` brings rows in the order of
    their experts, so `sort` changes nothing then.
    """

    name, record = "stg.moe", MoeRule
    section = Section.EXPERTS
    example = "stg.moe[dispatch = deepep]"

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        if request["moe_sort"] and request["moe_dispatch"] == "deepep":
            what = "--moe-sort is about all-to-alls, but --moe-dispatch is deepep"
            yield what, "leave out --moe-sort: deepep brings rows in the order of their experts"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        return super().from_flags(request) if "ep" in request.axes else iter(())
