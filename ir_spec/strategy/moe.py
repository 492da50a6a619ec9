"""How tokens get to the experts that a router chose, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stagec.ir_spec.strategy.axes import expert_parts, whole_experts
from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

#: Ranks of experts have all tokens; or tokens go to each node once, by kernels that write to it.
GATHER, DEEPEP = "gather", "deepep"


def same_tokens(flag: Callable[[str], Any]) -> bool:
    """Whether experts are those of some tensor-parallel ranks, which all have the same tokens.
    `flag` gives the value of a flag."""
    if flag("tp") == 1 or flag("ep") == 1 or flag("sp") or flag("dp_attention"):
        return False
    return whole_experts(flag) or expert_parts(flag) > 1


class MoeRule(Record):
    """How tokens get to the experts that a router chose, and back."""

    dispatch: str = parameter(
        "name",
        choices=("all_to_all", DEEPEP, GATHER),
        flag=Flag(
            "moe_dispatch",
            "Tokens reach their experts by an all-to-all, with a copy for each expert, or once "
            "per node and there once per rank (deepep); or ranks gather all tokens and add the "
            "results of their own experts (gather).",
            default="all-to-all",
        ),
    )
    payload: str = flagged(
        "moe_payload",
        "Send tokens in the element type of the experts' products, cast before (products), or in "
        "their own type, cast on arrival (tokens).",
        choices=("products", "tokens"),
        software=True,
    )
    sort: bool = flagged(
        "moe_sort",
        "Copy rows from an all-to-all into the order of their experts, and results back into the "
        "order of the ranks.",
        software=True,
    )
    two_batches: bool = flagged(
        "two_batch_overlap",
        "With --serve: two half batches, one of which computes while the tokens of the other "
        "travel to experts and back.",
    )

    @property
    def halves(self) -> int:
        """Into how many batches that overlap a step is divided."""
        return 2 if self.two_batches else 1


class MoeOp(Statement):
    """How tokens get to the experts that a router chose, and back.

    An `all_to_all` sends a copy of a token for each of the k experts that it takes. `deepep` sends
    one to each node that has some of them, from where one is forwarded to each such rank of the
    node; results of a rank and of a node are added up before they go back (DeepEP, normal kernels,
    and HybridEP of Megatron-Core; arXiv 2412.19437, section 3.2.2). How many nodes that are follows
    from k and, where the router takes experts of few groups (`top_groups` of `stg.route`), from
    their number. Steps that decode send a copy to each expert (DeepEP, low-latency kernels; SGLang,
    `deepep_mode = auto`). These kernels write to other nodes with constants of their own
    (`efficiency.network.LEVEL.direct`). It changes seconds: traces have the bytes of an all-to-all
    either way.

    Tokens that products take in 8 or 4 bits are cast before they are sent, as in DeepSeek-V3; with
    `payload = tokens` behind, as by Megatron-Core, whose dispatcher knows nothing of 8 bits
    (token_dispatcher.py, `token_dispatch`).

    What an all-to-all brings is in the order of the ranks that sent it. With `sort` a kernel of its
    own copies it into that of the experts, where a rank has several, and another one copies their
    results back (`sort-expert-rows`; Megatron-Core, token_dispatcher.py, `sort_chunks_by_idxs`),
    forward and backward. `deepep` brings rows in the order of their experts, so `sort` changes
    nothing then.

    With `gather` nothing is sent to an expert. Tokens that are split over the ranks of the experts
    are gathered, a rank fills the buffers of its own experts, and what experts make of a token is
    added up over these ranks: a reduce_scatter back to where tokens are split, an all_reduce where
    they are not (vLLM's and SGLang's expert parallelism without kernels of all-to-alls). Flags ask
    for it where experts are whole on the ranks of tensor parallelism, which have the same tokens.

    With `two_batches` a step of serving has two half batches that take turns in each layer, so that
    collectives of one run beside the computation of the other (DeepSeek, open-infra-index, day 6;
    SGLang's two-batch overlap). Each reads the weights of a rank: it pays where collectives take
    longer than that. In prefill products leave 20 processors of a device to kernels of DeepEP
    (SGLang, srt/operations_strategy.py: `deep_gemm_num_sms`).
    """

    name, record = "stg.moe", MoeRule
    section = Section.EXPERTS
    rare, needs = True, ("ep",)
    example = "stg.moe[dispatch = deepep]"

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        if request["moe_sort"] and (how := request["moe_dispatch"]) != "all-to-all":
            what = f"--moe-sort needs an all-to-all, found --moe-dispatch {how}"
            yield what, "leave out --moe-sort, or choose another --moe-dispatch"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        said = self.flag_values(request)
        if same_tokens(request.__getitem__):
            said["dispatch"] = GATHER
        if said:
            yield said
