"""Statements of a strategy about where values lie: how a model is laid out on a mesh, without
touching the model's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.ir.core import Operation
from stagec.ir.param import Param
from stagec.ir.traits import Declares, Holds
from stagec.ir_spec.ops.axes import DATA_AXES, EXPERTS, REPLICAS, SHARDING, TENSOR_PARALLEL
from stagec.ir_spec.ops.special_splits import ExchangeOp, GatherOp, RingOp
from stagec.ir_spec.ops.statement import (
    Axes,
    Flag,
    FlagValues,
    Record,
    Section,
    Statement,
    parameter,
)
from stagec.ir_spec.ops.structure import Declaration

RESHARD = ("always", "never", "last")
#: Blocks ahead of which parameters may be gathered.
MOST_AHEAD = 64


class StrategyOp(Declaration):
    """A parallelization strategy: statements that `apply-strategy` turns into placements."""

    name = "stg.strategy"
    traits = (Declares("strategy"), Holds("statements such as stg.split[B, over = dp]"))
    parents = ("stg.module",)
    params = (Param("mesh", "symbol", "the mesh that it is for"),)
    example = "stg.strategy @s[mesh = @pod] {\n  stg.split[B, over = dp]\n}"


@dataclass(frozen=True)
class SplitRule(Record):
    """Dimensions of these names are split over the axes."""

    dims: tuple[str, ...] = parameter("dims", "dimension names", required=True, positional=True)
    over: Axes = parameter("axes", "mesh axes", required=True)
    at: str = parameter("name", "rest, or everywhere by default", choices=("rest",))
    of: tuple[str, ...] = parameter("values", "only values of these names")
    weak: bool = parameter("flag", "give way where a computation uses the axes otherwise")
    only_with: tuple[str, ...] = parameter(
        "dims", "only in values that have one of these dimensions too"
    )

    @property
    def rest(self) -> bool:
        """Whether it is between blocks only."""
        return self.at == "rest"

    @property
    def soft(self) -> bool:
        """Whether it gives way where a computation uses the axes otherwise."""
        return self.rest or self.weak


class SplitOp(Statement):
    """Dimensions of these names are split over the axes wherever that can be.

    `at = rest` splits them only between blocks (carried values of a repeat, and parameters), where
    no computation uses the axis otherwise: sequence parallelism. With `weak` the split is
    everywhere, data included, but gives way to computations in the same way: the batch over the
    axis of expert parallelism. `only_with` limits it to values that have one of those
    dimensions too: the experts' weights, but not the router's. `of` names the values of the model
    that are split, arguments or results; for them it comes before statements without names.
    """

    name, record, repeats = "stg.split", SplitRule, True
    flags = (
        Flag(
            "etp",
            "Ranks that split each expert: as many as tp (0, the default), or 1.",
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
            "Of --serve: split the sequences between the blocks over tp, for whole experts.",
            "switch",
            False,
            needs=("tp",),
        ),
    )
    example = "stg.split[(H, G, F, V), over = tp]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if data := request.over(*DATA_AXES):
            yield {"dims": "B", "over": data}
        if "ep" in request.axes:
            yield {"dims": "B", "over": "ep", "weak": True}
        whole = request["etp"] == 1 and (request["ep"] > 1 or "ep" in request.axes)
        experts = request.over("ep", *(("tp",) if whole else ()))
        if experts and EXPERTS in request.sizes:
            yield {"dims": EXPERTS, "over": experts, "only_with": "M"}
        if "cp" in request.axes:
            yield {"dims": request.context, "over": "cp"}
        if "tp" in request.axes:
            yield from self._tensor_parallel(request)

    def _tensor_parallel(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        """Heads, width and vocabulary over all of it; KV heads over the part that they suffice
        for."""
        over = request.over("tp", REPLICAS)
        whole = ("M",) if request["etp"] == 1 else ()
        dims = [n for n in TENSOR_PARALLEL if n in request.sizes and n not in whole]
        if REPLICAS in request.axes and "G" in dims:
            dims.remove("G")
            yield {"dims": "G", "over": "tp"}
        if dims:
            yield {"dims": tuple(dims), "over": over}
        if request["sp"]:
            sequences = request.split_over("tp", REPLICAS)
            yield {"dims": sequences, "over": over, "at": "rest"}
        if request["dp_attention"]:
            yield {"dims": "B", "over": over, "at": "rest"}


@dataclass(frozen=True)
class DeferRule(Record):
    """Partial sums over these axes are handed on."""

    over: Axes = parameter("axes", "mesh axes", required=True)


class DeferOp(Statement):
    """Partial sums over these axes are handed on through products and rotations, and reduced where
    another reduction is due.

    For axes over which a value is replicated that others of its op split, as key and value heads
    are where tensor parallelism is wider than they are many.
    """

    name, record, repeats = "stg.defer", DeferRule, True
    example = "stg.defer[over = tpr]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if REPLICAS in request.axes and "tp" in request.axes and "G" in request.sizes:
            yield {"over": REPLICAS}


@dataclass(frozen=True)
class ShardParamsRule(Record):
    """The stage of ZeRO, the axes that it shards over, and when parameters are gathered."""

    over: Axes = parameter("axes", "mesh axes", required=True)
    zero: int = parameter(
        "int",
        "the stage",
        required=True,
        least=1,
        most=3,
        flag=Flag(
            "zero",
            "ZeRO stage over dp; 3 is FSDP.",
            needs=(SHARDING,),
            tries=(0, 1, 2, 3),
        ),
    )
    reshard: str = parameter(
        "name",
        "which blocks are dropped after forward",
        default="always",
        choices=RESHARD,
        flag=Flag(
            "reshard_after_forward",
            "ZeRO-3: drop gathered parameters after forward, of all blocks but the last, or not.",
            tries=("never", "last", "always"),
        ),
    )
    prefetch: int = parameter(
        "int",
        "blocks ahead that parameters are gathered",
        default=1,
        least=0,
        most=MOST_AHEAD,
        flag=Flag(
            "fsdp_prefetch", "ZeRO-3: gather parameters this many blocks ahead.", metavar="N"
        ),
    )
    overlap: bool = parameter(
        "flag",
        "of stage 1: parameters are gathered beside forward, not behind their update",
        default=False,
        flag=Flag(
            "overlap_param_gather",
            "ZeRO-1: gather updated parameters beside the forward of the first microbatch, block "
            "by block, in place of behind their update.",
        ),
    )


class ShardParamsOp(Statement):
    """ZeRO: optimizer state (1), gradients (2) or parameters too (3) are sharded over the axes.

    For stage 3, `reshard` says whether the gathered parameters of a block are dropped after forward
    and gathered again in backward (`always`), kept (`never`), or kept for the last block only,
    with which backward begins (`last`); `prefetch` says how many blocks ahead gathers are issued.
    What stages of a pipeline keep is gathered once, before the microbatches.

    At stage 1 the ranks gather parameters when they are updated, at the end of the step. With
    `overlap` they do so in the step that follows, block by block, beside the forward of its first
    microbatch, as Megatron-LM with `--overlap-param-gather`: between steps a rank has the part of
    the parameters that it updates.
    """

    name, record = "stg.shard_params", ShardParamsRule
    section = Section.DATA
    training = "it shards what training keeps of parameters; --tp, --pp and --ep split them"
    example = "stg.shard_params[over = dp, zero = 3, reshard = last]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        stage = op.integer("zero")
        for name in ("reshard", "prefetch"):
            if name in op.attrs and stage < 3:
                yield f"'{name}' says nothing at stage {stage}: no parameter is sharded"
        if op.flag("overlap") and stage != 1:
            yield f"'overlap' is of stage 1, found stage {stage}"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        over = request.over(*SHARDING)
        if request["zero"] and over:
            yield {"over": over, **self.flag_values(request)}

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        if request["overlap_param_gather"] and request["zero"] != 1:
            message = f"--overlap-param-gather is for --zero 1, found --zero {request['zero']}"
            yield message, "choose --zero 1, or leave it out"
        for flag in self.flags[1:3]:
            value = request[flag.name]
            if request["zero"] < 3 and not flag.is_default(value):
                message = (
                    f"{flag.option} {value} needs parameters that are sharded: --zero 3, found "
                    f"--zero {request['zero']}"
                )
                yield message, "choose --zero 3, or leave it out"


@dataclass(frozen=True)
class MicrobatchesRule(Record):
    """How many microbatches there are, and the symbol of the batch that they split."""

    count: int = parameter("int", "how many", default=1, required=True, least=1)
    split: str = parameter("dim", "the batch symbol", default="B")


class MicrobatchesOp(Statement):
    """Splits the batch into microbatches whose gradients are accumulated."""

    name, record = "stg.microbatches", MicrobatchesRule
    section = Section.DATA
    flags = (
        Flag(
            "microbatches",
            "Microbatches whose gradients are accumulated (default: 1, or 2 per pipeline stage).",
            "int",
            0,
            least=0,
        ),
    )
    example = "stg.microbatches[count = 4]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        count = microbatches(request["microbatches"], request.ranks("pp"))
        if count > 1:
            yield {"count": count}


def microbatches(given: int, stages: int) -> int:
    """How many microbatches a job has, with so many pipeline stages; 0: as many as fit them."""
    return given or (2 * stages if stages > 1 else 1)


@dataclass(frozen=True)
class PipelineRule(Record):
    """The repeated layers are cut into stages over an axis; no `layers`: evenly."""

    over: str = parameter("axis", "the mesh axis", required=True)
    schedule: str = parameter(
        "str",
        "the schedule",
        default="1f1b",
        flag=Flag(
            "schedule",
            "Pipeline schedule; 'stagec schedule' lists them.",
            metavar="NAME",
            needs=("pp",),
        ),
    )
    chunks: int = parameter(
        "int",
        "parts of the model per rank (default: the schedule's own)",
        least=0,
        flag=Flag(
            "chunks",
            "Parts of the model per stage (default: the schedule's own).",
            needs=("pp",),
        ),
    )
    layers: tuple[int, ...] = parameter(
        "ints",
        "layers of each part of the model",
        flag=Flag(
            "stage_layers",
            "Layers of each part of the model, first to last: 7,8*14,7 (default: evenly).",
            metavar="N,N*COUNT,...",
            needs=("pp",),
        ),
    )
    scatter: Axes = parameter(
        "axes",
        "mesh axes over which ranks send a part each of what all hold",
        flag=Flag(
            "scatter_gather",
            "Tensor-parallel ranks send a part each of what they hold alike to the next stage, "
            "which gathers it.",
            "switch",
            False,
            needs=("pp", "tp"),
        ),
    )


class PipelineOp(Statement):
    """Cuts the repeated layers into pipeline stages over an axis.

    Each rank holds `chunks` parts of the model. `layers` gives the layers of each part, first to
    last; by default all have the same, or the first and the last have fewer, for they hold
    embedding and head. The schedule is a built-in one or that of a plug-in. Receivers put the parts
    of a message that is scattered together with an all_gather.
    """

    name, record = "stg.pipeline", PipelineRule
    example = 'stg.pipeline[over = pp, schedule = "interleaved", chunks = 2]'

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "pp" in request.axes:
            said = {"over": "pp", "schedule": request["schedule"], **self.flag_values(request)}
            scatter = request.over("tp", REPLICAS) if request["scatter_gather"] else ()
            yield {**said, "scatter": scatter} if scatter else said


OPS = (
    StrategyOp(),
    SplitOp(),
    DeferOp(),
    ExchangeOp(),
    RingOp(),
    ShardParamsOp(),
    MicrobatchesOp(),
    PipelineOp(),
    GatherOp(),
)
