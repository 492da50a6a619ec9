"""Parameters, gradients and optimizer state that are sharded over data-parallel ranks."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.axes import PARTS, SHARDING, WITHIN
from stagec.ir_spec.strategy.flag_values import Axes, FlagValues, Problems, Statements
from stagec.ir_spec.strategy.mesh_flags import RESHARD_RANKS
from stagec.ir_spec.strategy.statement import (
    Record,
    Section,
    Statement,
    beside_wrong_values,
    flagged,
    parameter,
)

RESHARD = ("always", "never", "last")


#: The most blocks by which parameters are gathered early.
MOST_AHEAD = 64


class ShardParamsRule(Record):
    """The stage of ZeRO, the axes that it shards over, and when parameters are gathered."""

    over: Axes = parameter("axes", "mesh axes", required=True)
    zero: int = flagged(
        "zero",
        "ZeRO stage over dp; 3 is FSDP.",
        "int",
        doc="the stage",
        required=True,
        least=1,
        most=3,
        needs=(SHARDING,),
        tries=(0, 1, 2, 3),
    )
    reshard: str = flagged(
        "reshard_after_forward",
        "ZeRO-3: whether to free gathered parameters after forward: always, in all blocks but the "
        "last, or never.",
        choices=RESHARD,
        tries=("never", "last", "always"),
        only=("zero", 3),
        rare=True,
    )
    prefetch: int = flagged(
        "fsdp_prefetch",
        "ZeRO-3: gather parameters this many blocks ahead.",
        "int",
        default=1,
        least=0,
        most=MOST_AHEAD,
        only=("zero", 3),
        rare=True,
    )
    within: Axes = parameter("axes", "ZeRO-3: axes over which parameters stay split after forward")
    overlap: bool = flagged(
        "overlap_param_gather",
        "ZeRO-1: gather updated parameters during the forward of the first microbatch, block by "
        "block, not after their update.",
        only=("zero", 1),
        rare=True,
    )


class ShardParamsOp(Statement):
    """ZeRO: optimizer state (1), gradients (2) or parameters too (3) are sharded over the axes.

    At stage 3, `reshard` says whether the gathered parameters of a block are freed after forward
    and gathered again in backward (`always`), kept (`never`), or kept only for the last block, with
    which backward begins (`last`); `prefetch` is the number of blocks by which gathers are issued
    early. Parameters that pipeline stages keep are gathered once, before the microbatches. With the
    axes `within`, a subset of `over`, a rank keeps a copy of its part over these axes of a gathered
    block after forward, in the type that was sent, and backward gathers only over these axes: FSDP2
    with a number of ranks as `reshard_after_forward` (_fsdp_param.py: `to_sharded_post_forward`),
    hpZ of ZeRO++ (arXiv 2306.10209).

    At stage 1, the ranks gather parameters after their update, at the end of the step. With
    `overlap` they do so in the next step, block by block, during the forward of its first
    microbatch, as Megatron-LM with `--overlap-param-gather`: between steps, a rank has only the
    part of the parameters that it updates.
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
                yield f"'{name}' has no effect at stage {stage}, which shards no parameters"
        within, over = op.names("within"), op.names("over")
        if within and stage < 3:
            yield f"'within' has no effect at stage {stage}, which shards no parameters"
        elif within and not {*within} < {*over}:
            yield f"expects some of the axes of 'over' for 'within', found {', '.join(within)}"
        elif within and op.text("reshard", "always") != "always":
            yield "'within' needs 'reshard = always'"
        if op.flag("overlap") and stage != 1:
            yield f"'overlap' needs stage 1, found stage {stage}"

    def problems(self, request: FlagValues) -> Problems:
        yield from beside_wrong_values((*self.flags, RESHARD_RANKS), request)

    def from_flags(self, request: FlagValues) -> Statements:
        over = request.over(*SHARDING)
        if request["zero"] and over:
            within = _within(request, over) if request["zero"] == 3 else ()
            parts = {"within": within} if within else {}
            yield {"over": over, **self.flag_values(request), **parts}


def _within(request: FlagValues, over: Axes) -> Axes:
    """The axes over which blocks stay split: a part of data parallelism, or all of it if other axes
    shard as well."""
    if WITHIN in over:
        return (WITHIN,)
    data = tuple(a for a in over if a in PARTS)
    ranks = request["reshard_ranks"]
    return data if 1 < ranks == request.ranks(*data) < request.ranks(*over) else ()
