"""Statements of a strategy: how a model is laid out on a mesh, without touching the model's
text."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.expr import fraction
from stagec.ir.opdef import Param
from stagec.ir_spec.ops.structure import Declaration

_DIMS = Param("dims", "names", "dimension names", required=True, positional=True)
_OVER = Param("over", "names", "mesh axes", required=True)
DTYPES = ("f32", "bf16", "f16")


class StrategyOp(Declaration):
    """A parallelization strategy: statements that `apply-strategy` turns into placements."""

    name = "stg.strategy"
    has_region = True
    symbol = "required"
    params = (Param("mesh", "symbol", "the mesh that it is for"),)
    example = "stg.strategy @s[mesh = @pod] {\n  stg.split[B, over = dp]\n}"


class SplitOp(Declaration):
    """Dimensions of these names are split over the axes wherever that can be.

    `at = rest` splits them only between blocks (carried values of a repeat, and parameters), where
    no computation uses the axis otherwise: sequence parallelism. With `yields` the split is
    everywhere, data included, but gives way to computations in the same way: the batch over the
    axis of expert parallelism. `beside` limits it to values that have one of those dimensions too:
    the experts' weights, but not the router's.
    """

    name = "stg.split"
    params = (
        _DIMS,
        _OVER,
        Param("at", "name", "rest, or everywhere by default", choices=("rest",)),
        Param("yields", "flag", "give way where a computation uses the axes otherwise"),
        Param("beside", "names", "only in values that have one of these dimensions too"),
    )
    example = "stg.split[(H, G, F, V), over = tp]"


class GatherOp(Declaration):
    """Activations split over these dimensions are gathered before an op that would treat the split
    specially.

    `stg.gather[V]` gives a loss over gathered logits instead of a vocabulary-parallel one.
    """

    name = "stg.gather"
    params = (_DIMS,)
    example = "stg.gather[V]"


class ExchangeOp(Declaration):
    """Moves the split of a dimension to other ones around an op that would treat it specially.

    `stg.exchange[S, into = (H, G)]` is Ulysses: an all_to_all of queries, keys and values before
    attention, and of its result after.
    """

    name = "stg.exchange"
    params = (
        Param("dim", "name", "the dimension", required=True, positional=True),
        Param("into", "names", "the dimensions that are split instead", required=True),
    )
    example = "stg.exchange[S, into = (H, G)]"


class ShardParamsOp(Declaration):
    """ZeRO: optimizer state (1), gradients (2) or parameters too (3) are sharded over the axes."""

    name = "stg.shard_params"
    params = (_OVER, Param("zero", "int", "the stage, 1 to 3", required=True))
    example = "stg.shard_params[over = dp, zero = 3]"

    def verify(self, op: Operation) -> Iterator[str]:
        if not 1 <= op.integer("zero") <= 3:
            yield f"expects a stage from 1 to 3, found {op.integer('zero')}"


class MicrobatchesOp(Declaration):
    """Splits the batch into microbatches whose gradients are accumulated."""

    name = "stg.microbatches"
    params = (
        Param("count", "int", "how many", required=True),
        Param("split", "name", "the batch symbol (B)"),
    )
    example = "stg.microbatches[count = 4]"

    def verify(self, op: Operation) -> Iterator[str]:
        if op.integer("count") < 1:
            yield f"expects at least one microbatch, found {op.integer('count')}"


class DtypesOp(Declaration):
    """Element types: of parameters and activations, gradients, reductions on the wire, the master
    copy."""

    name = "stg.dtypes"
    params = tuple(
        Param(n, "name", f"of the {n}", choices=DTYPES)
        for n in ("param", "grad", "reduce", "master")
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


class CapacityOp(Declaration):
    """The capacity factor of expert buffers: rows beyond balanced load, padded with zeros."""

    name = "stg.capacity"
    params = (Param("factor", "ratio", "1 or more", required=True),)
    example = "stg.capacity[factor = 5/4]"

    def verify(self, op: Operation) -> Iterator[str]:
        if fraction(op.expr("factor")) < 1:
            yield f"expects a factor of 1 or more, found {op.expr('factor')}"


class RecomputeOp(Declaration):
    """Which activations backward computes again instead of taking them from the stash.

    `selective`: what grows with the square of a dimension, as attention scores do. `full`: all but
    the inputs of the blocks; what nothing in backward needs is not computed. `full_replay`: all of
    the block, as the published formulas count.
    """

    name = "stg.recompute"
    params = (
        Param(
            "policy",
            "name",
            "none, selective, full or full_replay",
            required=True,
            positional=True,
            choices=("none", "selective", "full", "full_replay"),
        ),
    )
    example = "stg.recompute[selective]"


class BucketOp(Declaration):
    """Gradient reductions of DDP and ZeRO-1 are cut into calls of this many bytes."""

    name = "stg.bucket"
    params = (Param("bytes", "int", "bytes of one call", required=True),)
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


OPS = (
    StrategyOp(),
    SplitOp(),
    GatherOp(),
    ExchangeOp(),
    ShardParamsOp(),
    MicrobatchesOp(),
    DtypesOp(),
    TpInputsOp(),
    CapacityOp(),
    RecomputeOp(),
    BucketOp(),
    OptimizerOp(),
)
