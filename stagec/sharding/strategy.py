"""Strategies as data: reads a `stg.strategy` op into the records of its statements, for passes.

    strategy = read_strategy(module)
    strategy.one(BucketRule).bytes       # 0, the default, if there is no such statement
    strategy.all(SplitRule)          # of statements that may repeat

What most passes ask for has a property of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar, cast

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.module import Mesh, Module
from stagec.ir_spec.strategy.blocking import BlockingRule
from stagec.ir_spec.strategy.bucket import BucketRule
from stagec.ir_spec.strategy.capacity import CapacityRule
from stagec.ir_spec.strategy.defer import DeferRule
from stagec.ir_spec.strategy.dtypes import DtypesRule
from stagec.ir_spec.strategy.exchange import ExchangeRule
from stagec.ir_spec.strategy.expert_load import ExpertLoadRule
from stagec.ir_spec.strategy.flag_values import Axes
from stagec.ir_spec.strategy.gather import GatherRule
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.ir_spec.strategy.microbatches import MicrobatchesRule
from stagec.ir_spec.strategy.offload import OffloadRule
from stagec.ir_spec.strategy.optimizer import OptimizerRule
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.ir_spec.strategy.recompute import RecomputeRule
from stagec.ir_spec.strategy.ring import RingRule
from stagec.ir_spec.strategy.shard_params import ShardParamsRule
from stagec.ir_spec.strategy.split import SplitRule
from stagec.ir_spec.strategy.statement import Record, Statement
from stagec.ir_spec.strategy.tp_inputs import TpInputsRule
from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN, Loc

__all__ = [
    "ExpertLoadRule",
    "GatherRule",
    "PipelineRule",
    "RecomputeRule",
    "RingRule",
    "SplitRule",
    "Strategy",
    "read_strategy",
]

S = TypeVar("S", bound=Record)


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a strategy says, by the records of its statements."""

    records: Mapping[type[Record], tuple[Record, ...]] = field(
        default_factory=dict[type[Record], "tuple[Record, ...]"]
    )
    loc: Loc = UNKNOWN

    def all(self, kind: type[S]) -> tuple[S, ...]:
        """The parameters of all statements of a kind, in order."""
        return cast("tuple[S, ...]", self.records.get(kind, ()))

    def one(self, kind: type[S]) -> S:
        """The parameters of the statement of a kind, with the defaults of an absent one."""
        given = self.all(kind)
        return given[0] if given else kind()

    # -- where values lie --------------------------------------------------------------------------

    @property
    def splits(self) -> tuple[SplitRule, ...]:
        """Which dimensions are split over which axes."""
        return self.all(SplitRule)

    def ranks_of(self, name: str, mesh: Mesh | None) -> int:
        """The ranks that split a dimension, as far as their number is known."""
        axes = {a for rule in self.splits if name in rule.dims for a in rule.over}
        return prod(mesh.sizes.get(a) or 1 for a in axes) if mesh is not None else 1

    @property
    def whole(self) -> tuple[GatherRule, ...]:
        """Which values are kept whole, and in which dimensions."""
        return tuple(g for g in self.all(GatherRule) if g.of)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Dimensions that are gathered before an op that would treat their split specially."""
        return tuple(n for g in self.all(GatherRule) if not g.of for n in g.dims)

    @property
    def deferred(self) -> Axes:
        """Axes over which partial sums are handed on."""
        return tuple(a for d in self.all(DeferRule) for a in d.over)

    @property
    def exchanged(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Dimensions whose split moves to other ones."""
        return tuple((e.dim, e.into) for e in self.all(ExchangeRule))

    @property
    def rings(self) -> tuple[RingRule, ...]:
        """Along which dimensions attention passes its parts round the ranks."""
        return self.all(RingRule)

    @property
    def zero(self) -> int:
        """The stage of ZeRO, 0 to 3."""
        return self.one(ShardParamsRule).zero

    @property
    def zero_axes(self) -> Axes:
        """Axes over which ZeRO shards."""
        return self.one(ShardParamsRule).over

    @property
    def reshard(self) -> str:
        """Which gathered blocks are dropped after forward."""
        return self.one(ShardParamsRule).reshard

    @property
    def within(self) -> Axes:
        """Axes over which what forward has gathered stays split until backward."""
        return self.one(ShardParamsRule).within

    @property
    def gathers_first(self) -> bool:
        """Whether parameters are gathered when the step begins: they are sharded at rest, and their
        gradients are reduced once."""
        return self.one(ShardParamsRule).overlap

    @property
    def reduces_once(self) -> bool:
        """Whether gradients that microbatches add up are reduced behind the last one only, also
        where ZeRO shards them."""
        when = self.one(GradientsRule).reduced
        return when == "once" or (when == "staged" and self.pipeline is not None)

    @property
    def prefetch(self) -> int:
        """How many blocks ahead parameters are gathered."""
        return self.one(ShardParamsRule).prefetch

    @property
    def microbatches(self) -> int:
        """How many there are."""
        return self.one(MicrobatchesRule).count

    @property
    def batch(self) -> str:
        """The symbol of the batch."""
        return self.one(MicrobatchesRule).split

    @property
    def pipeline(self) -> PipelineRule | None:
        """How layers are cut into stages, if they are."""
        return next(iter(self.all(PipelineRule)), None)

    # -- how it runs -------------------------------------------------------------------------------

    @property
    def dtypes(self) -> DtypesRule:
        """Element types."""
        return self.one(DtypesRule)

    @property
    def save_gathered(self) -> bool:
        """Whether the gathered inputs of split matmuls are kept for backward."""
        return self.one(TpInputsRule).policy == "save_gathered"

    @property
    def blocking(self) -> Axes:
        """Axes over which collectives of activations block."""
        return tuple(a for b in self.all(BlockingRule) for a in b.over)

    @property
    def recompute(self) -> RecomputeRule:
        """What backward recomputes."""
        return self.one(RecomputeRule)

    @property
    def offload(self) -> OffloadRule:
        """What lives in host memory."""
        return self.one(OffloadRule)

    @property
    def bucket(self) -> int:
        """Bytes of a call that reduces gradients, 0 for one call."""
        return self.one(BucketRule).bytes

    @property
    def optimizer(self) -> OptimizerRule:
        """The optimizer."""
        return self.one(OptimizerRule)

    @property
    def capacity(self) -> Expr | None:
        """The capacity factor of expert buffers, if one is given."""
        return self.one(CapacityRule).factor

    @property
    def loads(self) -> tuple[ExpertLoadRule, ...]:
        """Relative loads of the experts."""
        return self.all(ExpertLoadRule)


def read_strategy(module: Module) -> Strategy:
    """The module's strategy; the default one if it has none. Raises `DiagnosticError` if there are
    two."""
    ops = module.ops("stg.strategy")
    if len(ops) > 1:
        raise error(
            "the module has two strategies, expected one", ops[1].loc, remedy="remove one of them"
        )
    if not ops or ops[0].region is None:
        return Strategy()
    records: dict[type[Record], tuple[Record, ...]] = {}
    for op in ops[0].region.ops:
        _read(op, records)
    return Strategy(records, ops[0].loc)


def _read(op: Operation, records: dict[type[Record], tuple[Record, ...]]) -> None:
    """Add what one statement says."""
    statement = op.definition
    if not isinstance(statement, Statement):
        raise error(
            f"'{op.name}' is not a statement of a strategy",
            op.loc,
            remedy="'stagec ops' lists those that are: stg.split, stg.shard_params, ...",
        )
    before = records.get(statement.record, ())
    if before and not statement.repeats:
        raise error(
            f"the strategy has two {op.name} statements, expected one",
            op.loc,
            remedy="remove one of them",
        )
    records[statement.record] = (*before, statement.read(op))
