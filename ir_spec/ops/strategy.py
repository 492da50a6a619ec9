"""Statements of a strategy: how a model is laid out on a mesh, without touching the model's
text."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.expr import const, fraction
from stagec.ir.param import Param
from stagec.ir.traits import Declares, Holds
from stagec.ir_spec.ops.structure import Declaration

_DIMS = Param("dims", "dims", "dimension names", required=True, positional=True)
_OVER = Param("over", "axes", "mesh axes", required=True)
ORDERS = ("zigzag", "plain")
_OF = Param("of", "values", "only values of these names")
RESHARD = ("always", "never", "last")
RECOMPUTE = ("none", "selective", "full", "full_replay")
OFFLOAD = ("activations", "optimizer")
DTYPES = ("f32", "bf16", "f16")
FP8 = ("hybrid", "e4m3")
#: Blocks ahead of which parameters may be gathered.
MOST_AHEAD = 64


class StrategyOp(Declaration):
    """A parallelization strategy: statements that `apply-strategy` turns into placements."""

    name = "stg.strategy"
    traits = (Declares("strategy"), Holds("statements such as stg.split[B, over = dp]"))
    parents = ("stg.module",)
    params = (Param("mesh", "symbol", "the mesh that it is for"),)
    example = "stg.strategy @s[mesh = @pod] {\n  stg.split[B, over = dp]\n}"


class SplitOp(Declaration):
    """Dimensions of these names are split over the axes wherever that can be.

    `at = rest` splits them only between blocks (carried values of a repeat, and parameters), where
    no computation uses the axis otherwise: sequence parallelism. With `weak` the split is
    everywhere, data included, but gives way to computations in the same way: the batch over the
    axis of expert parallelism. `only_with` limits it to values that have one of those
    dimensions too: the experts' weights, but not the router's. `of` names the values of the model
    that are split, arguments or results; for them it comes before statements without names.
    """

    name = "stg.split"
    params = (
        _DIMS,
        _OVER,
        Param("at", "name", "rest, or everywhere by default", choices=("rest",)),
        _OF,
        Param("weak", "flag", "give way where a computation uses the axes otherwise"),
        Param("only_with", "dims", "only in values that have one of these dimensions too"),
    )
    example = "stg.split[(H, G, F, V), over = tp]"


class GatherOp(Declaration):
    """Activations split over these dimensions are gathered before an op that would treat the split
    specially.

    `stg.gather[V]` gives a loss over gathered logits instead of a vocabulary-parallel one. With
    `of`, the values of these names are whole in the dimensions instead, whoever uses them.
    """

    name = "stg.gather"
    params = (_DIMS, _OF)
    example = "stg.gather[V]"


class DeferOp(Declaration):
    """Partial sums over these axes are handed on through products and rotations, and reduced where
    another reduction is due.

    For axes over which a value is replicated that others of its op split, as key and value heads
    are where tensor parallelism is wider than they are many.
    """

    name = "stg.defer"
    params = (_OVER,)
    example = "stg.defer[over = tpr]"


class ExchangeOp(Declaration):
    """Moves the split of a dimension to other ones around an op that would treat it specially.

    `stg.exchange[S, into = (H, G)]` is Ulysses: an all_to_all of queries, keys and values before
    attention, and of its result after.
    """

    name = "stg.exchange"
    params = (
        Param("dim", "dim", "the dimension", required=True, positional=True),
        Param("into", "dims", "the dimensions that are split instead", required=True),
    )
    example = "stg.exchange[S, into = (H, G)]"


class RingOp(Declaration):
    """Leaves attention split along a dimension: keys and values go round the ranks (ring attention,
    arXiv 2310.01889).

    `order = zigzag`, the default, gives rank i of n the chunks i and 2n-1-i of 2n, so that a causal
    mask leaves the same work to all. `order = plain` gives it one piece: the last rank computes
    2n-1 times what the first one does.
    """

    name = "stg.ring"
    params = (
        Param("dim", "dim", "the dimension", required=True, positional=True),
        Param("order", "name", "how positions lie on ranks (default zigzag)", choices=ORDERS),
    )
    example = "stg.ring[S, order = zigzag]"


class ShardParamsOp(Declaration):
    """ZeRO: optimizer state (1), gradients (2) or parameters too (3) are sharded over the axes.

    For stage 3, `reshard` says whether the gathered parameters of a block are dropped after forward
    and gathered again in backward (`always`), kept (`never`), or kept for the last block only,
    with which backward begins (`last`); `prefetch` says how many blocks ahead gathers are issued.
    What stages of a pipeline keep is gathered once, before the microbatches.
    """

    name = "stg.shard_params"
    params = (
        _OVER,
        Param("zero", "int", "the stage, 1 to 3", required=True),
        Param("reshard", "name", "after forward (default always)", choices=RESHARD),
        Param("prefetch", "int", "blocks ahead that parameters are gathered (default 1)"),
    )
    example = "stg.shard_params[over = dp, zero = 3, reshard = last]"

    def verify(self, op: Operation) -> Iterator[str]:
        if not 1 <= op.integer("zero") <= 3:
            yield f"expects a stage from 1 to 3, found {op.integer('zero')}"
        stage = op.integer("zero")
        for name in ("reshard", "prefetch"):
            if name in op.attrs and stage < 3:
                yield f"'{name}' says nothing at stage {stage}: no parameter is sharded"
        if not 0 <= op.integer("prefetch", 1) <= MOST_AHEAD:
            yield f"'prefetch' expects 0 to {MOST_AHEAD}, found {op.integer('prefetch')}"


class MicrobatchesOp(Declaration):
    """Splits the batch into microbatches whose gradients are accumulated."""

    name = "stg.microbatches"
    params = (
        Param("count", "int", "how many", required=True),
        Param("split", "dim", "the batch symbol (B)"),
    )
    example = "stg.microbatches[count = 4]"

    def verify(self, op: Operation) -> Iterator[str]:
        if op.integer("count") < 1:
            yield f"expects at least one microbatch, found {op.integer('count')}"


class PipelineOp(Declaration):
    """Cuts the repeated layers into pipeline stages over an axis.

    Each rank holds `chunks` parts of the model. `layers` gives the layers of each part, first to
    last; by default all have the same, or the first and the last have fewer, for they hold
    embedding and head. The schedule is a built-in one or that of a plug-in. Receivers put the parts
    of a message that is scattered together with an all_gather.
    """

    name = "stg.pipeline"
    params = (
        Param("over", "axis", "the mesh axis", required=True),
        Param("schedule", "str", 'the schedule (default "1f1b")'),
        Param("chunks", "int", "parts of the model per rank (default: the schedule's own)"),
        Param("layers", "ints", "layers of each part of the model"),
        Param("scatter", "axes", "mesh axes over which ranks send a part each of what all hold"),
    )
    example = 'stg.pipeline[over = pp, schedule = "interleaved", chunks = 2]'


class DtypesOp(Declaration):
    """Element types: of parameters and activations, gradients, reductions on the wire, the master
    copy.

    With `fp8` both operands of the blocks' products with parameters are 8-bit floats: f8e4m3 in
    forward, in backward f8e5m2 (`hybrid`) or the same (`e4m3`) for what comes in. Results, and
    parameters at rest, keep their type.
    """

    name = "stg.dtypes"
    params = (
        *(
            Param(n, "name", f"element type: {n}", choices=DTYPES)
            for n in ("param", "grad", "reduce", "master")
        ),
        Param("fp8", "name", "recipe of 8-bit products", choices=FP8),
    )
    example = "stg.dtypes[param = bf16, grad = f32, reduce = f32, master = f32]"


class TpInputsOp(Declaration):
    """Whether backward gathers the inputs of split matmuls again (regather) or keeps them
    (save-gathered)."""

    name = "stg.tp_inputs"
    params = (
        Param(
            "policy",
            "name",
            "regather or save_gathered",
            required=True,
            positional=True,
            choices=("regather", "save_gathered"),
        ),
    )
    example = "stg.tp_inputs[regather]"


class BlockingOp(Declaration):
    """Collectives of activations over these axes block: they run in the stream of computations.

    A computation that is issued after one waits for it, whether it uses the result or not, and it
    waits for the computation before it. Without the statement only data dependencies hold between
    the two streams (asynchronous tensor parallelism).
    """

    name = "stg.blocking"
    params = (_OVER,)
    example = "stg.blocking[over = tp]"


class CapacityOp(Declaration):
    """The capacity factor of expert buffers: rows beyond balanced load, padded with zeros."""

    name = "stg.capacity"
    params = (Param("factor", "ratio", "1 or more", required=True),)
    example = "stg.capacity[factor = 5/4]"

    def verify(self, op: Operation) -> Iterator[str]:
        factor = op.expr("factor")
        if factor.symbols or fraction(factor) < 1:
            yield f"expects a number of 1 or more as factor, found {factor}"


class ExpertLoadOp(Declaration):
    """How many tokens the experts take, relative to each other: one number for each.

    With `layer` it is about one layer, counted from 0 among those with experts; without, about all
    that no other statement is about. Ranks take whole rows, shared out by largest remainders.
    """

    name = "stg.expert_load"
    params = (
        Param("loads", "ints", "one for each expert, 0 or more", required=True),
        Param("layer", "int", "the layer (default: all others)"),
    )
    example = "stg.expert_load[loads = (5, 1, 1, 1), layer = 0]"

    def verify(self, op: Operation) -> Iterator[str]:
        loads = op.integers("loads")
        if any(n < 0 for n in loads) or not any(loads):
            yield "expects loads of 0 or more, and not only 0"
        if op.integer("layer", 0) < 0:
            yield f"counts layers from 0, found {op.integer('layer')}"


class RecomputeOp(Declaration):
    """Which activations of a block backward computes again instead of taking them from the stash.

    `selective`: what grows with the square of a dimension, as attention scores do. `full`: all but
    the inputs of the blocks; what nothing in backward needs is not computed. `full_replay`: all of
    the block, as the published formulas count. `ops` instead names the ops whose results are not
    stashed. `layers` recomputes in the first blocks of each stage only (Megatron-LM's method
    `block`), `every` in every n-th block (as torchtitan does); the others stash all.
    """

    name = "stg.recompute"
    params = (
        Param(
            "policy",
            "name",
            "none, selective, full or full_replay",
            positional=True,
            choices=RECOMPUTE,
        ),
        Param("ops", "names", "ops whose results are computed again, as in (attention, swiglu)"),
        Param("layers", "int", "only in this many first blocks"),
        Param("every", "int", "only in every n-th block"),
    )
    example = "stg.recompute[full, layers = 4]"

    def verify(self, op: Operation) -> Iterator[str]:
        if ("policy" in op.attrs) == ("ops" in op.attrs):
            yield "expects a policy or a list of ops, and not both"
        if "layers" in op.attrs and "every" in op.attrs:
            yield "'layers' and 'every' both say in which blocks"
        for name in ("layers", "every"):
            if name in op.attrs and op.integer(name) < 1:
                yield f"'{name}' expects at least 1, found {op.integer(name)}"
            if name in op.attrs and op.text("policy") == "none":
                yield f"nothing is computed again, so '{name}' says nothing"


class OffloadOp(Declaration):
    """What lives in host memory and is copied to the device where it is used.

    `activations`: what the blocks stash; `optimizer`: master copies and moments. With `nodes` the
    copies are nodes of the trace, which run beside computations.
    """

    name = "stg.offload"
    params = (
        Param(
            "what",
            "names",
            "activations, optimizer or both",
            required=True,
            positional=True,
            choices=OFFLOAD,
        ),
        Param("nodes", "flag", "the copies are nodes of the trace"),
    )
    example = "stg.offload[optimizer]"

    def verify(self, op: Operation) -> Iterator[str]:
        for name in op.names("what"):
            if name not in OFFLOAD:
                yield f"offloads {' or '.join(OFFLOAD)}, found '{name}'"


class BucketOp(Declaration):
    """Gradients are reduced while backward goes on, under ZeRO 0 and 1: those that are complete go
    together until a call has this many bytes. Without it there is one call after backward.

    The rule is that of PyTorch's DDP and of Megatron-LM (`overlap_grad_reduce`): no gradient is
    cut, and the one with which a call reaches its size closes it. Each chunk of a pipeline stage
    has calls of its own. PyTorch's first call, of 1 MiB, is not modelled.
    """

    name = "stg.bucket"
    params = (Param("bytes", "int", "bytes with which a call is full", required=True),)
    example = "stg.bucket[bytes = 26214400]"

    def verify(self, op: Operation) -> Iterator[str]:
        if op.integer("bytes") < 1:
            yield f"expects at least one byte, found {op.integer('bytes')}"


class OptimizerOp(Declaration):
    """The optimizer: AdamW with clipping of the gradient norm to `clip` (0: no clipping)."""

    name = "stg.optimizer"
    params = (
        Param(
            "kind",
            "name",
            "adamw or none",
            required=True,
            positional=True,
            choices=("adamw", "none"),
        ),
        Param("clip", "ratio", "the largest gradient norm (default 1)"),
    )
    example = "stg.optimizer[adamw, clip = 1]"

    def verify(self, op: Operation) -> Iterator[str]:
        clip = op.expr("clip") if "clip" in op.attrs else const(1)
        if clip.symbols or fraction(clip) < 0:
            yield f"expects a number of 0 or more as clip, found {clip}"


OPS = (
    StrategyOp(),
    SplitOp(),
    GatherOp(),
    DeferOp(),
    ExchangeOp(),
    RingOp(),
    ShardParamsOp(),
    MicrobatchesOp(),
    PipelineOp(),
    DtypesOp(),
    TpInputsOp(),
    BlockingOp(),
    CapacityOp(),
    ExpertLoadOp(),
    RecomputeOp(),
    OffloadOp(),
    BucketOp(),
    OptimizerOp(),
)
