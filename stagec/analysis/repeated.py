"""Redundant work: computations in which no dimension and no sum is split over an axis, so that all
ranks of the axis compute the same.

    %y = stg.einsum["bsd,df->bsf"](%x, %w) : bf16[B@dp, S, F@tp]     ranks of cp repeat it

The FLOPs of a rank in forward, backward and recomputation count; those that the optimizer repeats
without ZeRO are expected, and few. Norms that tensor-parallel ranks repeat without sequence
parallelism are redundant too, but normal: shares below `NOTABLE` are not reported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from stagec.ir.core import Operation, Region
from stagec.ir.expr import Expr, UnboundError, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.memo import MemoByType
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.pipeline.instrument import Hooks
from stagec.pipeline.passes import Pass
from stagec.sharding.strategy import read_strategy
from stagec.sharding.work import is_computation, work_of
from stagec.support.diagnostics import Diagnostic

#: The pass after which types are those of a rank.
PLACED = "insert-collectives"
#: The share of the FLOPs of a rank from which repeated work is reported.
NOTABLE = Fraction(1, 5)
_PHASES = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Repeated:
    """The share of the FLOPs of a rank that all ranks of an axis repeat, and the operation with the
    most of them."""

    axis: str
    share: Fraction
    most: Operation

    def remark(self) -> Diagnostic:
        """A remark about the share and the operation."""
        where = next((r.type for r in self.most.results if isinstance(r.type, TensorType)), None)
        text = (
            f"ranks of {self.axis} repeat {float(self.share):.0%} of their FLOPs, most in "
            f"'{self.most.name}' of {where}: none of its dimensions is split over {self.axis}"
        )
        remedy = f"split one of them (stg.split[..., over = {self.axis}]), or use fewer ranks"
        return Diagnostic(text, self.most.loc, "remark", remedy)


class RepeatedWork(Hooks):
    """Finds the repeated work of a step after collectives are inserted."""

    def __init__(self) -> None:
        self.entries: tuple[Repeated, ...] = ()

    def after_pass(self, pass_: Pass, module: Module) -> None:
        if pass_.name == PLACED and module.decisions is None:
            self.entries = tuple(repeated_work(module))

    @property
    def shares(self) -> dict[str, float]:
        """The nonzero shares by axis."""
        return {r.axis: round(float(r.share), 6) for r in self.entries if r.share}

    def remarks(self) -> Iterator[Diagnostic]:
        """A remark for each axis with a notable share."""
        yield from (r.remark() for r in self.entries if r.share >= NOTABLE)


def repeated_work(module: Module) -> Iterator[Repeated]:
    """The repeated work of each axis of a partitioned module; nothing if a size is open."""
    stages = read_strategy(module).pipeline
    sizes: Mapping[str, int | None] = module.mesh.sizes if module.mesh else {}
    axes = [a for a, n in sizes.items() if n != 1 and (stages is None or a != stages.over)]
    if not axes:
        return
    try:
        work = list(_flops(module))
    except UnboundError:
        return
    everything = sum(n for _, n in work)
    for axis in axes:
        shared = [(op, n) for op, n in work if n and axis not in _axes(op)]
        if shared:
            most = max(shared, key=lambda each: each[1])[0]
            yield Repeated(axis, Fraction(sum(n for _, n in shared), everything), most)


def _flops(module: Module) -> Iterator[tuple[Operation, int]]:
    """All computations, each with its FLOPs per rank and step."""
    env = planned_env(module)

    def flops(op: Operation) -> Expr:
        return work_of(op).flops

    costs = MemoByType(flops)

    def inside(region: Region, times: int) -> Iterator[tuple[Operation, int]]:
        for op in region.ops:
            if op.region is not None:
                count = evaluate(op.expr("count"), env) if "count" in op.attrs else 1
                yield from inside(op.region, times * int(count))
            elif op.phase in _PHASES and is_computation(op):
                flops: Expr = costs(op)
                yield op, int(evaluate(flops, env)) * times

    for func in module.functions:
        yield from inside(func.body, 1)


def _axes(op: Operation) -> frozenset[str]:
    """The axes over which a dimension or a sum of the operation is split."""
    types = [v.type for v in (*op.operands, *op.results)]
    tensors = [t for t in types if isinstance(t, TensorType)]
    return frozenset(a for t in tensors for a in (*t.axes, *t.partial_axes))
