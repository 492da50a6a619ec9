"""The data of the memory picture: the memory of each rank class over the time of a step.

Times are those of a roofline: a computation takes the longer of its FLOPs at the rate of the device
and its bytes at the bandwidth of its memory. Communication, copies to the host and launches take no
time. Pipeline stages wait for each other's actions, and the optimizer starts after all of them. If
ranks of a class differ by their coordinates, times are those of the last one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from stagec.analysis.footprint import check_sizes, operation_text, ranks_of
from stagec.ir.core import Operation, Region
from stagec.ir.expr import Env, evaluate
from stagec.ir.kernel import MEMORY
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.traits import Repeats
from stagec.machines import Machine
from stagec.memory.curve import BufferKind, Curve, CurveColumn, Span, Stretches
from stagec.memory.step import ActionRegion
from stagec.memory.timeline import ALL, MemoryTimeline, line_of
from stagec.program.kernels import Kernel
from stagec.schedule.attached import placement_of, stages_of
from stagec.schedule.costs import Costs
from stagec.schedule.simulate import replay
from stagec.sharding.work import is_computation, work_of
from stagec.time.costs.durations import Durations

#: The largest number of operations of a function that can be drawn, over all iterations.
MOST_OPERATIONS = 250_000
#: Values whose bytes never reach the peak divided by this are shown together.
SMALL = 1000
SMALLER = "smaller buffers"
_PICOSECONDS = 10**12


@dataclass(frozen=True, slots=True)
class Band:
    """The buffers of a value over the step, or all smaller ones of a category (as 1 byte each): the
    bytes of `each`, and the columns at which their number changes, with the new number."""

    name: str
    type: str
    category: str
    line: str
    each: int
    changes: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Instant:
    """The start of a column in picoseconds, and its highest moment: actions, operation and phase
    ("" while the rank waits)."""

    start: int
    title: str
    operation: str
    phase: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A rank class over its step: the peak in bytes, the end of the step in picoseconds, columns
    and bands."""

    stage: int
    ranks: int
    peak: int
    time: int
    moments: Sequence[Instant]
    bands: Sequence[Band]


def pictures(module: Module, machine: Machine, most: int) -> list[Picture]:
    """A picture of each rank class of a planned module, by stage, with at most `most` columns.

    Raises `DiagnosticError` if a size is open, or for too many operations.
    """
    stages = dict(sorted(_stages(module, machine)))
    spans = _spans(module, stages)
    over = max((end for row in spans.values() for _, end in row), default=None)
    return [
        _picture(stage, each, Curve(each.timeline, each.shared, spans.get(stage, ()), over), most)
        for stage, each in stages.items()
    ]


@dataclass(frozen=True, slots=True)
class _Stage:
    ranks: int
    timeline: MemoryTimeline
    shared: Stretches


def _stages(module: Module, machine: Machine) -> Iterator[tuple[int, _Stage]]:
    duration = _duration(module, machine)
    for func in module.functions:
        check_sizes(module, func)
        _check_operations(module, func)
        sized = MemoryTimeline.planner(module, func, whole=True)
        shared, ranks = Stretches(sized, duration), ranks_of(module, func)
        for stage in stages_of(func) or (0,):
            yield stage, _Stage(ranks, MemoryTimeline(module, func, stage, sized), shared)


def _check_operations(module: Module, func: Operation) -> None:
    count = _operations(func.body, module.env)
    if count > MOST_OPERATIONS:
        raise func.error(
            f"a picture of @{func.symbol} would have {count:,} operations, more than "
            f"{MOST_OPERATIONS:,}",
            remedy="draw a job of fewer layers, or with more pipeline stages",
        )


def _operations(region: Region, env: Env) -> int:
    """The number of operations of a region, over all iterations of repeats."""
    ops = len(region.ops)
    for op in region.ops:
        if op.region is not None:
            count = evaluate(op.expr("count"), env) if op.has(Repeats) else 1
            ops += count * _operations(op.region, env)
    return ops


# -- time ------------------------------------------------------------------------------------------


def _duration(module: Module, machine: Machine) -> Callable[[Operation], int]:
    """The time of an operation, in whole picoseconds."""
    sizes: Mapping[str, int | None] = module.mesh.sizes if module.mesh else {}
    last = {f"{axis}_index": (size or 1) - 1 for axis, size in sizes.items()}
    env = {**last, **planned_env(module)}
    seconds = Durations(machine).of(module)

    def picoseconds(op: Operation) -> int:
        if not is_computation(op):
            return 0
        work = work_of(op)
        kernel = Kernel(MEMORY, "", (), evaluate(work.flops, env), evaluate(work.bytes, env))
        return round(seconds.of_kernel(kernel) * _PICOSECONDS)

    return cache(picoseconds)


def _spans(module: Module, stages: Mapping[int, _Stage]) -> Mapping[int, Sequence[Span]]:
    """The start and end of each turn of the schedule, by stage; the first one begins when all
    stages are ready."""
    placement = placement_of(module, module.functions[0])
    if placement is None:
        return {}
    times = {stage: each.shared.times() for stage, each in stages.items()}
    costs = [_costs(times[home.rank], home.chunk) for home in placement.homes]
    clock = replay(tuple(each.timeline.order for each in stages.values()), placement, costs)
    ready = max(each.shared.before for each in stages.values())
    return {
        stage: [(ready + turn[0].start, ready + turn[0].end) for turn in clock.steps(stage)]
        for stage in stages
    }


def _costs(times: Mapping[ActionRegion, int], chunk: int) -> Costs:
    """The times of the actions of a chunk, at least a picosecond where costs must be positive."""
    forward, backward, weights = (
        times.get((kind, chunk), 0) for kind in ("forward", "backward", "weights")
    )
    least = max(1, weights)
    return Costs(max(1, forward), max(backward + weights, least + 1), least)


# -- columns and bands -----------------------------------------------------------------------------


def _picture(stage: int, each: _Stage, curve: Curve, most: int) -> Picture:
    columns = curve.columns(most)
    peak = max(c.total for c in columns)
    moments = [_moment(c) for c in columns]
    bands = sorted(_bands(columns, curve.sizes, peak), key=lambda b: ALL.index(b.category))
    return Picture(stage, each.ranks, peak, curve.time, moments, bands)


def _moment(column: CurveColumn) -> Instant:
    if column.step is None:
        return Instant(column.start, column.title, "", "")
    op = column.step.op
    return Instant(column.start, column.title, operation_text(op), op.phase)


def _bands(
    columns: Sequence[CurveColumn], sizes: Mapping[BufferKind, int], peak: int
) -> Iterator[Band]:
    """The bands, largest first, and one for the smaller values of each category."""
    most: dict[BufferKind, int] = {}
    for column in columns:
        for kind, count in column.counts.items():
            most[kind] = max(most.get(kind, 0), count * sizes[kind])
    large = [k for k in sorted(most, key=lambda k: -most[k]) if most[k] * SMALL >= peak]
    for value, category in large:
        row = [c.counts.get((value, category), 0) for c in columns]
        each = sizes[value, category]
        yield Band(value.name, str(value.type), category, line_of(value), each, _changes(row))
    small = most.keys() - set(large)
    for category in dict.fromkeys(c for _, c in most):
        kinds = [k for k in small if k[1] == category]
        row = [sum(c.counts.get(k, 0) * sizes[k] for k in kinds) for c in columns]
        if any(row):
            yield Band(SMALLER, "", category, "", 1, _changes(row))


def _changes(row: Sequence[int]) -> list[tuple[int, int]]:
    """The places at which a row of numbers changes, starting from 0, and the new numbers."""
    return [(i, n) for i, (before, n) in enumerate(pairwise([0, *row])) if n != before]
