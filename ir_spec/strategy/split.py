"""Dimensions that are split over axes of the mesh, and when a split yields to computations."""

from stagec.ir.serving_step import DECODE, MIXED
from stagec.ir_spec.strategy.axes import (
    DATA_AXES,
    EXPERT_PART,
    EXPERT_WIDTH,
    EXPERTS,
    MORE_KEYS,
    REPLICAS,
    SHARED_WIDTH,
    TENSOR_AXES,
    key_heads,
    tensor_parallel,
    whole_experts,
)
from stagec.ir_spec.strategy.flag_values import SERVE, Axes, FlagValues, Problems, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, parameter


class SplitRule(Record):
    """Dimensions of these names are split over the axes."""

    dims: tuple[str, ...] = parameter("dims", "dimension names", required=True, positional=True)
    over: Axes = parameter("axes", "mesh axes", required=True)
    at: str = parameter("name", "rest, or everywhere by default", default="", choices=("rest",))
    of: tuple[str, ...] = parameter("values", "only values of these names")
    weak: bool = parameter("flag", "give way where a computation uses the axes otherwise")
    only_with: tuple[str, ...] = parameter(
        "dims", "only in values that have one of these dimensions too"
    )

    @property
    def rest(self) -> bool:
        """Whether it applies only between blocks."""
        return self.at == "rest"

    @property
    def soft(self) -> bool:
        """Whether it yields to computations that use the axes for other dimensions."""
        return self.rest or self.weak


def key_axes(request: FlagValues, name: str) -> Axes:
    """The axes of tensor parallelism that split these heads of keys and values: the first ones
    whose ranks divide their number, at least those that split the fewest heads of a layer."""
    axes = request.over(*TENSOR_AXES)
    least, size = len(request.over(EXPERT_PART, "tp")), request.sizes[name] or 1
    counts = range(len(axes), least, -1)
    count = next((n for n in counts if size % request.ranks(*axes[:n]) == 0), least)
    return axes[:count]


class SplitOp(Statement):
    """Splits dimensions of these names over the axes wherever possible.

    `at = rest` splits them only between blocks (carried values of a repeat, and parameters), if no
    computation uses the axis for another dimension: sequence parallelism. With `weak`, the split
    applies everywhere, including data, but yields to computations in the same way: the batch over
    the axis of expert parallelism. `only_with` limits it to values that also have one of those
    dimensions: the experts' weights, but not the router's. `of` names the values of the model that
    are split, arguments or results; for them it has priority over statements without names.
    """

    name, record, repeats = "stg.split", SplitRule, True
    flags = (
        Flag(
            "etp",
            "Ranks that split each expert: as many as tp, or 1, or tp over --ep if that takes some "
            "ranks of tp. The default, 0, means 1 if --ep takes all ranks of tp, otherwise as many "
            "as it leaves.",
            "int",
            0,
            least=0,
            needs=(EXPERTS, "tp"),
        ),
        Flag(
            "sp",
            "Sequence parallelism between the blocks, over tp.",
            "switch",
            False,
            needs=("tp",),
            tries=(False, True),
        ),
        Flag(
            "dp_attention",
            "With --serve: split the sequences between the blocks over tp, for whole experts.",
            "switch",
            False,
            needs=("tp",),
        ),
        Flag(
            "dcp",
            "With --serve decode and mixed: ranks of tp that split the cached tokens of a sequence "
            "(decode context parallelism of vLLM).",
            "int",
            1,
            needs=("tp", SERVE),
            rare=True,
        ),
        Flag(
            "whole_shared_experts",
            "Each rank of tp has all of the shared experts, as in SGLang with "
            "SGLANG_SHARED_EXPERT_TP1, where blocks of low-bit weights do not divide.",
            "switch",
            False,
            needs=(EXPERTS, "tp"),
            rare=True,
        ),
    )
    example = "stg.split[(H, G, F, V), over = tp]"

    def from_flags(self, request: FlagValues) -> Statements:
        if data := request.over(*DATA_AXES):
            yield {"dims": "B", "over": data}
        if "ep" in request.axes:
            yield {"dims": "B", "over": "ep", "weak": True}
        whole = whole_experts(request.__getitem__) and (request["ep"] > 1 or "ep" in request.axes)
        experts = request.over("ep", *(TENSOR_AXES if whole else (EXPERT_PART,)))
        if experts and EXPERTS in request.sizes:
            yield {"dims": EXPERTS, "over": experts, "only_with": EXPERT_WIDTH}
        if "cp" in request.axes:
            yield {"dims": request.context, "over": "cp"}
        if "tp" in request.axes:
            yield from self._tensor_parallel(request)

    def problems(self, request: FlagValues) -> Problems:
        if request["dcp"] > 1 and request["dp_attention"]:
            yield (
                "--dcp splits sequences of all ranks of tp, but --dp-attention gives each its own",
                "leave one of them out",
            )
        if request["dcp"] > 1 and "cp" in request.axes:
            yield "--cp and --dcp both split cached tokens", "leave one of them out"

    def _tensor_parallel(self, request: FlagValues) -> Statements:
        """Heads, widths and vocabulary are split over all of tensor parallelism, fewer KV heads
        over as many ranks as there are heads, experts over the ranks with the same experts."""
        over = request.over(*TENSOR_AXES)
        whole = [EXPERT_WIDTH] if whole_experts(request.__getitem__) else []
        whole += [SHARED_WIDTH] if request["whole_shared_experts"] else []
        dims = [n for n in tensor_parallel(request.sizes) if n not in whole]
        if REPLICAS in request.axes:
            few: dict[Axes, list[str]] = {}
            for name in key_heads(dims):
                few.setdefault(key_axes(request, name), []).append(name)
            few.pop(over, None)
            for axes, names in few.items():
                dims = [n for n in dims if n not in names]
                yield {"dims": names[0] if len(names) == 1 else tuple(names), "over": axes}
        if EXPERT_PART in request.axes and EXPERT_WIDTH in dims:
            dims.remove(EXPERT_WIDTH)
            yield {"dims": EXPERT_WIDTH, "over": request.over("tp", *MORE_KEYS, REPLICAS)}
        if dims:
            yield {"dims": tuple(dims), "over": over}
        if request["dcp"] > 1 and request.flags.get(SERVE) in (DECODE, MIXED):
            yield {"dims": "past", "over": request.over(*MORE_KEYS, REPLICAS) or over}
        if request["sp"]:
            sequences = request.split_over(*TENSOR_AXES)
            yield {"dims": sequences, "over": over, "at": "rest"}
        if request["dp_attention"]:
            yield {"dims": "B", "over": over, "at": "rest"}
