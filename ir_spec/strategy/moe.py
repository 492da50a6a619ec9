"""How tokens are sent to the experts that a router chose, and back."""

from collections.abc import Callable
from typing import Any

from stagec.ir_spec.strategy.axes import EXPERTS, expert_parts, whole_experts
from stagec.ir_spec.strategy.flag_values import FlagValues, Problems, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

#: Ranks of experts gather all tokens; or kernels write each token to a node once.
GATHER, DEEPEP = "gather", "deepep"


def same_tokens(flag: Callable[[str], Any]) -> bool:
    """Whether experts are split over tensor-parallel ranks, which all have the same tokens. `flag`
    returns the value of a flag."""
    if flag("tp") == 1 or flag("ep") == 1 or flag("sp") or flag("dp_attention"):
        return False
    return whole_experts(flag) or expert_parts(flag) > 1


class MoeRule(Record):
    """How tokens are sent to the experts that a router chose, and back."""

    dispatch: str = parameter(
        "name",
        choices=("all_to_all", DEEPEP, GATHER),
        flag=Flag(
            "moe_dispatch",
            "Tokens reach their experts by an all-to-all, with a copy for each expert, or once "
            "per node and there once per rank (deepep); or ranks gather all tokens and add the "
            "results of their own experts (gather).",
            default="all-to-all",
            needs=("ep",),
        ),
    )
    payload: str = flagged(
        "moe_payload",
        "Send tokens in the element type of the experts' products, cast before (products), or in "
        "their own type, cast on arrival (tokens).",
        choices=("products", "tokens"),
        software=True,
        needs=("ep",),
    )
    sort: bool = flagged(
        "moe_sort",
        "Copy rows from an all-to-all into the order of their experts, and results back into the "
        "order of the ranks.",
        software=True,
        needs=("ep",),
    )
    weights: str = flagged(
        "moe_weights",
        "Results of experts are multiplied by the weights of tokens where they are added up "
        "(results), or their gated activations are, by weights that are sent with the tokens "
        "(activation).",
        choices=("results", "activation"),
        software=True,
        needs=(EXPERTS,),
    )
    inputs: str = flagged(
        "moe_inputs",
        "Gather rows of experts that tensor-parallel ranks split again in backward as --tp-inputs "
        "says (regather), or save them (save-gathered).",
        choices=("regather", "save_gathered"),
        software=True,
        needs=(EXPERTS, "sp"),
    )
    names: str = flagged(
        "moe_names",
        "Rows of experts end with their last use (op), or code has names for them until the layer "
        "returns, and for what keeps the graph of a checkpoint until its next forward (layer).",
        choices=("op", "layer"),
        software=True,
        needs=(EXPERTS,),
    )
    shared: str = flagged(
        "moe_shared",
        "Shared experts are computed where the model's text has them (text), or before tokens are "
        "sent to the routed ones (first).",
        choices=("text", "first"),
        software=True,
        needs=(EXPERTS,),
    )
    two_batches: bool = flagged(
        "two_batch_overlap",
        "With --serve: two half batches, one of which computes while the tokens of the other "
        "travel to experts and back.",
        needs=("ep",),
    )


class MoeOp(Statement):
    """How tokens are sent to the experts that a router chose, and back.

    An `all_to_all` sends a copy of a token for each of its k experts. `deepep` sends one copy to
    each node that has some of them, from where one is forwarded to each such rank of the node;
    results of a rank and of a node are added up before they are sent back (DeepEP, normal kernels,
    and HybridEP of Megatron-Core; arXiv 2412.19437, section 3.2.2). The number of nodes follows
    from k and, if the router chooses experts of few groups (`top_groups` of `stg.route`), from the
    number of groups. Decode steps send a copy to each expert (DeepEP, low-latency kernels; SGLang,
    `deepep_mode = auto`). The constants of these kernels are `efficiency.network.LEVEL.direct`.
    Only seconds change: traces have the bytes of an all-to-all in both cases.

    Tokens for products in 8 or 4 bits are cast before they are sent, as in DeepSeek-V3; with
    `payload = tokens` they are cast after they arrive, as in Megatron-Core, whose dispatcher does
    not support 8 bits (token_dispatcher.py, `token_dispatch`).

    The result of an all-to-all is in the order of the sending ranks. With `sort`, a separate kernel
    copies it into the order of the experts, if a rank has several, and another one copies their
    results back (`sort-expert-rows`; Megatron-Core, token_dispatcher.py, `sort_chunks_by_idxs`), in
    forward and backward. `deepep` delivers rows in the order of their experts, so `sort` has no
    effect with it.

    Results are multiplied by the weights of tokens where they are added up, and backward keeps
    them. With `weights = activation`, weights are sent with the tokens, and the kernel of a gated
    activation multiplies by them, so that backward keeps no results (`weigh-activations`;
    Megatron-Core 0.13, core/transformer/moe/experts.py, `weighted_bias_swiglu_impl` in
    `TEGroupedMLP.forward`).

    If ranks split the width of experts and the tokens, they gather the rows that they receive.
    Backward does so again, unless `stg.tp_inputs` saves what products gather. With
    `inputs = save_gathered` gathered rows are saved in any case: the dispatcher of Megatron-Core
    gathers them before the products (`MoEAlltoAllTokenDispatcher.dispatch_postprocess`).

    With `names = layer`, rows before and after both exchanges stay until results are added up, as
    code has names for them (Megatron-Core, core/transformer/moe/moe_layer.py: `MoELayer.forward`).
    A checkpoint runs its backward on a graph of its own, for which the dispatcher has a name
    (`MoEAlltoAllTokenDispatcher.dispatch_preprocess`, `self.probs`) until the next forward of the
    layer. So its inputs and their gradients stay (`keep-expert-rows`); the plan has them to the end
    of the microbatch.

    With `shared = first`, shared experts are computed before the rows of routed ones
    (Megatron-Core, core/transformer/moe/moe_layer.py: `MoELayer.experts_compute`), and their
    backward follows that of the routed ones (`order-shared-experts`).

    With `gather`, nothing is sent to an expert. Tokens that are split over the ranks of the experts
    are gathered, a rank fills the buffers of its own experts, and the results for each token are
    added up over these ranks: with a reduce_scatter if tokens are split, otherwise with an
    all_reduce (expert parallelism of vLLM and SGLang without all-to-all kernels). Flags choose it
    if experts are whole on the ranks of tensor parallelism, which have the same tokens.

    With `two_batches`, a serving step has two half batches that alternate in each layer, so that
    collectives of one overlap with the computation of the other (DeepSeek, open-infra-index, day 6;
    SGLang's two-batch overlap). Each half reads all weights of a rank, so it helps only if
    collectives take longer than that. In prefill, products leave 20 processors of a device to the
    kernels of DeepEP (SGLang, srt/operations_strategy.py: `deep_gemm_num_sms`).
    """

    name, record = "stg.moe", MoeRule
    section = Section.EXPERTS
    rare = True
    example = "stg.moe[dispatch = deepep]"

    def problems(self, request: FlagValues) -> Problems:
        if request["moe_sort"] and (how := request["moe_dispatch"]) != "all-to-all":
            what = f"--moe-sort needs an all-to-all, found --moe-dispatch {how}"
            yield what, "leave out --moe-sort, or choose another --moe-dispatch"

    def from_flags(self, request: FlagValues) -> Statements:
        said = self.flag_values(request)
        if same_tokens(request.__getitem__):
            said["dispatch"] = GATHER
        if said:
            yield said
