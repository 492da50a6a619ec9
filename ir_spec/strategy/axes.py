"""The mesh axes of flags, the dimensions that they split, and their order."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

#: Axes over which the batch is split.
DATA_AXES = ("dp_replicate", "dp_shard", "dp")
#: Axes over which ZeRO shards.
SHARDING = ("dp", "dp_shard", "ep", "cp")
#: Axes over which all gradients are reduced.
REDUCED = ("dp", "dp_replicate", "dp_shard", "ep", "cp")
#: Heads of keys and values: of all layers or of one kind of them.
KEY_HEADS = ("G", "G_global", "G_local")
#: Heads: of attention, of its keys and values; of a vision tower next to a text model; of
#: state-space layers and linear attention, and their groups; groups of heads whose results have
#: products of their own; the channels of Mamba-1.
HEADS = ("H", *KEY_HEADS, "H_v", "H_m", "G_m", "G_o", "I")
#: Heads, feed-forward widths, and heads of keys and values with a number: of the stages of an image
#: encoder after the first one, of a decoder that differs from its encoder, of some layers.
_NUMBERED = re.compile(r"([HFG])_(\d+)")
#: The feed-forward width of an expert.
EXPERT_WIDTH = "M"
#: The feed-forward width of shared experts.
SHARED_WIDTH = "F_shared"
#: Feed-forward widths: dense, of dense layers beside experts, of an expert, of shared experts.
WIDTHS = ("F", "F_dense", EXPERT_WIDTH, SHARED_WIDTH)
#: The vocabulary.
VOCABULARY = "V"
#: The dimensions without a number that tensor parallelism splits: heads, feed-forward widths,
#: vocabulary, and that of a second table of embeddings.
_TENSOR_PARALLEL = (*HEADS, *WIDTHS, "F_v", VOCABULARY, "V_own")
#: The part of tensor parallelism over which experts are split, if `ep` takes some of its ranks.
EXPERT_PART = "tpe"
#: The parts of tensor parallelism that split KV heads of layers with more of them than others.
MORE_KEYS = ("tpk", "tpk2", "tpk3")
#: The part of tensor parallelism over which KV heads are replicated, if there are too few.
REPLICAS = "tpr"
#: The part of data parallelism over which parameters stay split between forward and backward.
WITHIN = "dp_within"
#: The inner axis of each axis of a flag that may be split in two.
PARTS = {"dp": (WITHIN,), "dp_shard": (WITHIN,)}
#: The axes that tensor parallelism is split into, slowest first.
TENSOR_AXES = (EXPERT_PART, "tp", *MORE_KEYS, REPLICAS)
#: The dimension that only models with experts have.
EXPERTS = "E"
#: The axes of a mesh of flags, slowest first.
AXES = ("pp", *DATA_AXES, "ep", "cp", "tp")


def tensor_parallel(names: Collection[str]) -> list[str]:
    """The dimensions among these that tensor parallelism splits."""
    numbered = sorted(
        ("HFG".index(match[1]), int(match[2]), name)
        for name in names
        if (match := _NUMBERED.fullmatch(name))
    )
    return [*(n for n in _TENSOR_PARALLEL if n in names), *(name for *_, name in numbered)]


def key_heads(names: Collection[str]) -> list[str]:
    """The heads of keys and values among these dimensions."""
    return [n for n in tensor_parallel(names) if n in KEY_HEADS or re.fullmatch(r"G_\d+", n)]


def known_key_heads(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """The numbers of heads of keys and values of layers that are known, by symbol, from the fewest
    on."""
    known = {n: size for n in key_heads(sizes) if (size := sizes[n]) is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))


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
