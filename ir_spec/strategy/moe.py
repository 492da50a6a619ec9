"""How tokens get to the experts that a router chose, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.ir_spec.strategy.axes import whole_experts
from stagec.ir_spec.strategy.statement import (
    Flag,
    FlagValues,
    Record,
    Section,
    Statement,
    parameter,
)

#: Ranks of experts have all tokens.
GATHER = "gather"


def same_tokens(flag: Callable[[str], Any]) -> bool:
    """Whether experts are whole on tensor-parallel ranks that all have the same tokens. `flag`
    gives the value of a flag."""
    if flag("tp") == 1 or flag("ep") == 1 or flag("sp") or flag("dp_attention"):
        return False
    return whole_experts(flag)


@dataclass(frozen=True)
class MoeRule(Record):
    """How tokens get to the experts that a router chose, and back."""

    dispatch: str = parameter(
        "name",
        "all_to_all: a copy for each expert; deepep: one for each node, and from there on; gather: "
        "the ranks of experts have all tokens, each takes those of its own experts",
        default="all_to_all",
        choices=("all_to_all", "deepep", GATHER),
        flag=Flag(
            "moe_dispatch",
            "Tokens go to their experts by an all-to-all, a copy for each expert, or once to each "
            "node and from there on (deepep); or all ranks gather all tokens, and add up what "
            "their own experts make of them (gather).",
            default="all-to-all",
            needs=("ep",),
            rare=True,
        ),
    )
    two_batches: bool = parameter(
        "flag",
        "of serving: two half batches, of which one computes while tokens of the other move",
        flag=Flag(
            "two_batch_overlap",
            "Of --serve: two half batches, of which one computes while tokens of the other are on "
            "their way to experts and back.",
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

    With `gather` nothing is sent to an expert. Tokens that are split over the ranks of the experts
    are gathered, a rank fills the buffers of its own experts, and what experts make of a token is
    added up over these ranks: a reduce_scatter back to where tokens are split, an all_reduce where
    they are not (vLLM's and SGLang's expert parallelism without kernels of all-to-alls). Flags ask
    for it where experts are whole on the ranks of tensor parallelism, which have the same tokens.

    With `two_batches` a step of serving has two half batches that take turns in each layer, so that
    collectives of one run beside the computation of the other (DeepSeek, open-infra-index, day 6;
    SGLang's two-batch overlap). Each reads the weights of a rank: it pays where collectives take
    longer than that.
    """

    name, record = "stg.moe", MoeRule
    section = Section.EXPERTS
    example = "stg.moe[dispatch = deepep]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        said = self.flag_values(request) if "ep" in request.axes else {}
        if same_tokens(request.__getitem__):
            said["dispatch"] = GATHER
        if said:
            yield said
