"""The mesh axes of flags, the dimensions that they split, and their order."""

from collections.abc import Callable, Iterable
from typing import Any

#: Axes over which the batch is split.
DATA_AXES = ("dp_replicate", "dp_shard", "dp")
#: Axes over which ZeRO shards.
SHARDING = ("dp", "dp_shard", "ep", "cp")
#: Axes over which all gradients are reduced.
REDUCED = ("dp", "dp_replicate", "dp_shard", "ep", "cp")
#: Heads: of attention, of its keys and values; of a vision tower next to a text model; of
#: state-space layers and linear attention, and their groups; groups of heads whose results have
#: products of their own; the channels of Mamba-1.
HEADS = ("H", "G", "H_v", "H_m", "G_m", "G_o", "I")
#: Heads and feed-forward widths of the stages of an image encoder after the first one, and of a
#: decoder that differs from its encoder.
_STAGES = (*(f"{symbol}_{stage}" for symbol in "HF" for stage in range(2, 6)), "G_2")
#: The feed-forward width of an expert.
EXPERT_WIDTH = "M"
#: The feed-forward width of shared experts.
SHARED_WIDTH = "F_shared"
#: Feed-forward widths: dense, of an expert, of shared experts.
WIDTHS = ("F", EXPERT_WIDTH, SHARED_WIDTH)
#: The vocabulary.
VOCABULARY = "V"
#: The dimensions that tensor parallelism splits: heads, feed-forward widths (dense, of an expert,
#: of shared experts), vocabulary.
TENSOR_PARALLEL = (*HEADS, *WIDTHS, "F_v", VOCABULARY, *_STAGES)
#: The part of tensor parallelism over which experts are split, if `ep` takes some of its ranks.
EXPERT_PART = "tpe"
#: The part of tensor parallelism over which KV heads are replicated, if there are too few.
REPLICAS = "tpr"
#: The part of data parallelism over which parameters stay split between forward and backward.
WITHIN = "dp_within"
#: The inner axis of each axis of a flag that may be split in two.
PARTS = {"dp": (WITHIN,), "dp_shard": (WITHIN,)}
#: The axes that tensor parallelism is split into, slowest first.
TENSOR_AXES = (EXPERT_PART, "tp", REPLICAS)
#: The dimension that only models with experts have.
EXPERTS = "E"
#: The axes of a mesh of flags, slowest first.
AXES = ("pp", *DATA_AXES, "ep", "cp", "tp")


def whole_experts(flag: Callable[[str], Any]) -> bool:
    """Whether tensor parallelism leaves experts whole: if `etp` is 1, or if it is left out and `ep`
    needs the ranks of `tp` in addition to the data-parallel ones. `flag` returns the value of a
    flag.

    | dp | tp | ep | etp | whole |
    |----|----|----|-----|-------|
    | 8  | 2  | 8  | 0   | no    |
    | 1  | 8  | 8  | 0   | yes   |
    | 2  | 4  | 8  | 0   | yes   |
    | 8  | 2  | 8  | 1   | yes   |
    """
    etp, ep = flag("etp"), flag("ep")
    if etp or ep == 1:
        return bool(etp == 1)
    tp, data = flag("tp"), flag("dp") if flag("dp") > 1 else flag("dp_shard")
    return bool(tp > 1 and data % ep and ep % tp == 0 and data * tp % ep == 0)


def expert_parts(flag: Callable[[str], Any]) -> int:
    """The number of parts of tensor parallelism with different experts, which are split over the
    ranks of a part: `ep`, if it takes some ranks of `tp` and no data-parallel ones, otherwise 1.
    `flag` returns the value of a flag.

    | dp | tp | ep | etp | parts |
    |----|----|----|-----|-------|
    | 1  | 8  | 2  | 0   | 2     |
    | 1  | 8  | 2  | 4   | 2     |
    | 1  | 8  | 8  | 0   | 1     |
    | 2  | 8  | 2  | 0   | 1     |
    """
    tp, ep = flag("tp"), flag("ep")
    alone = flag("dp") == flag("dp_shard") == 1 < ep < tp
    return int(ep) if alone and tp % ep == 0 and flag("etp") in (0, tp // ep) else 1


def ordered(axes: Iterable[str], order: str) -> list[str]:
    """The axes of a mesh, where those that `order` names are permuted among their positions.

    | axes       | order   | result     |
    |------------|---------|------------|
    | pp, dp, tp | dp,pp   | dp, pp, tp |
    | pp, dp, tp | tp,pp   | tp, dp, pp |
    | dp, tp     | dp,pp   | dp, tp     |
    """
    result = list(axes)
    named = [name for name in order.split(",") if name in result]
    places = sorted(map(result.index, named))
    for place, name in zip(places, named, strict=True):
        result[place] = name
    return result
