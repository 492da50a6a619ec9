"""Strategies as data: the records of the statements of a `stg.strategy`, for passes.

    strategy = read_strategy(module)
    strategy.one(BucketRule).bytes       # 0, the default, if there is no such statement
    strategy.all(SplitRule)          # of statements that may repeat

Frequent queries have properties of their own.
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
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.ir_spec.strategy.offload import OffloadRule
from stagec.ir_spec.strategy.optimizer import OptimizerRule
from stagec.ir_spec.strategy.part import PartRule
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.ir_spec.strategy.recompute import RecomputeRule
from stagec.ir_spec.strategy.ring import RingRule
from stagec.ir_spec.strategy.shard_params import ShardParamsRule
from stagec.ir_spec.strategy.split import SplitRule
from stagec.ir_spec.strategy.statement import Record, Statement
from stagec.ir_spec.strategy.tp_inputs import TpInputsRule
from stagec.support.diagnostics import Located
from stagec.support.source import UNKNOWN, Loc

S = TypeVar("S", bound=Record)


@dataclass(frozen=True, slots=True)
class Strategy(Located):
    """A strategy, as the records of its statements by kind."""

    records: Mapping[type[Record], tuple[Record, ...]] = field(
        default_factory=dict[type[Record], "tuple[Record, ...]"]
    )
    loc: Loc = UNKNOWN

    def all(self, kind: type[S]) -> tuple[S, ...]:
        """The records of all statements of a kind, in order."""
        return cast("tuple[S, ...]", self.records.get(kind, ()))

    def one(self, kind: type[S]) -> S:
        """The record of the statement of a kind; one with defaults if there is none."""
        given = self.all(kind)
        return given[0] if given else kind()

    # -- placement ---------------------------------------------------------------------------------

    @property
    def splits(self) -> tuple[SplitRule, ...]:
        """The splits of dimensions over axes."""
        return self.all(SplitRule)

    def axes_of(self, name: str) -> Axes:
        """The axes that split a dimension, each once."""
        axes = (a for rule in self.splits if name in rule.dims for a in rule.over)
        return tuple(dict.fromkeys(axes))

    def ranks_of(self, name: str, mesh: Mesh | None) -> int:
        """The number of ranks that split a dimension; axes without a size count as 1."""
        return prod(mesh.sizes.get(a) or 1 for a in self.axes_of(name)) if mesh is not None else 1

    @property
    def whole(self) -> tuple[GatherRule, ...]:
        """The named values that are not split, with dimensions."""
        return tuple(g for g in self.all(GatherRule) if g.of)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Dimensions that are gathered before an op that would treat their split specially."""
        return tuple(n for g in self.all(GatherRule) if not g.of for n in g.dims)

    @property
    def deferred(self) -> Axes:
        """Axes over which partial sums are passed on."""
        return tuple(a for d in self.all(DeferRule) for a in d.over)

    @property
    def exchanged(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Dimensions whose split is exchanged for that of other dimensions."""
        return tuple((e.dim, e.into) for e in self.all(ExchangeRule))

    @property
    def rings(self) -> tuple[RingRule, ...]:
        """The dimensions along which attention runs as a ring."""
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
        """The policy for dropping gathered blocks after forward: always, never or last."""
        return self.one(ShardParamsRule).reshard

    @property
    def within(self) -> Axes:
        """Axes over which gathered parameters stay split between forward and backward."""
        return self.one(ShardParamsRule).within

    @property
    def gathers_first(self) -> bool:
        """Whether parameters are gathered when the step begins: they are sharded at rest, and their
        gradients are reduced once."""
        return self.one(ShardParamsRule).overlap

    @property
    def reduces_once(self) -> bool:
        """Whether gradients that microbatches add up are reduced only after the last one, even if
        ZeRO shards them."""
        when = self.one(GradientsRule).reduced
        return when == "once" or (when == "staged" and self.pipeline is not None)

    @property
    def prefetch(self) -> int:
        """The number of blocks by which parameters are gathered early."""
        return self.one(ShardParamsRule).prefetch

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.one(MicrobatchesRule).count

    @property
    def batch(self) -> str:
        """The symbol of the batch."""
        return self.one(MicrobatchesRule).split

    @property
    def in_turn(self) -> int:
        """The number of parts of a batch that take turns in each layer of a step of serving."""
        apart = [rule.batches for rule in self.all(PartRule) if rule.feed_forward]
        return max([1, *apart, 2 * self.one(MoeRule).two_batches])

    @property
    def turns(self) -> int:
        """The number of parts of a batch that take turns: those of `in_turn` of each microbatch."""
        return max(1, self.microbatches) * self.in_turn

    @property
    def pipeline(self) -> PipelineRule | None:
        """The pipeline of stages, or None."""
        return next(iter(self.all(PipelineRule)), None)

    # -- execution ---------------------------------------------------------------------------------

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
        """The recompute policy of backward."""
        return self.one(RecomputeRule)

    @property
    def offload(self) -> OffloadRule:
        """The values in host memory."""
        return self.one(OffloadRule)

    @property
    def bucket(self) -> int:
        """Bytes per call that reduces gradients, 0 for a single call."""
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
    """The strategy of a module; the default one if it has none. Raises `DiagnosticError` if there
    are two, or for an invalid statement."""
    ops = module.ops("stg.strategy")
    if len(ops) > 1:
        raise ops[1].error(
            "the module has two strategies, expected one", remedy="remove one of them"
        )
    if not ops or ops[0].region is None:
        return Strategy()
    records: dict[type[Record], tuple[Record, ...]] = {}
    for op in ops[0].region.ops:
        _read(op, records)
    return Strategy(records, ops[0].loc)


def _read(op: Operation, records: dict[type[Record], tuple[Record, ...]]) -> None:
    """Add the record of one statement. Raises `DiagnosticError`."""
    statement = op.definition
    if not isinstance(statement, Statement):
        raise op.error(
            f"'{op.name}' is not a statement of a strategy",
            remedy="'stagec ops' lists those that are: stg.split, stg.shard_params, ...",
        )
    before = records.get(statement.record, ())
    if before and not statement.repeats:
        raise op.error(
            f"the strategy has two {op.name} statements, expected one", remedy="remove one of them"
        )
    records[statement.record] = (*before, statement.read(op))
