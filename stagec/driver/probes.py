"""Probes of a search: small jobs that say what a microbatch takes and holds, for lower bounds.

A probe has the work of a microbatch: as many ranks as that is split over, one stage, one microbatch
and few layers; from two numbers of layers follows what each further layer adds. Many points of a
space share a probe, and probes share compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagec.driver.common import kept_reports
from stagec.driver.figures import CompiledJob
from stagec.driver.flags import FLAGS
from stagec.driver.legal import BATCH, count_of, size_of
from stagec.driver.options import JobOptions
from stagec.driver.search_space import data_ranks, microbatch_of
from stagec.explore.bounds import Floats, Shape, Work, memory_bound, time_bound
from stagec.machines import Machine
from stagec.schedule.action import round_robin
from stagec.schedule.base import Schedule
from stagec.schedule.registry import SCHEDULES
from stagec.sharding.stages import evenly
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.time.replay import ClassReplay
from stagec.time.step import step_time
from stagec.time.streams import PICOSECONDS

#: The symbol of the layers that are many, and how many of them probes have.
LAYERS = "L"
_FEW = (2, 4)
#: Probes are of the clock of the devices; that of the hosts can only make a step longer.
_NO_HOST = {"efficiency.host.issue": 0.0}
_STATIC = ("parameters", "gradients", "optimizer")
#: Flags of which a probe of the work of a microbatch has the default: they are about many
#: microbatches, stages or data-parallel ranks.
_OF_STEPS = (
    *("pp", "dp", "dp_replicate", "dp_shard", "schedule", "chunks", "stage_layers"),
    *("scatter_gather", "zero", "reshard_after_forward", "fsdp_prefetch", "microbatches"),
    *("ddp_bucket", "recompute_layers", "recompute_every"),
)
#: Flags of which a probe of the state of a job has the default.
_OF_WORK = (
    *("recompute", "recompute_layers", "recompute_every", "pp", "schedule", "chunks"),
    *("stage_layers", "scatter_gather", "microbatches"),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe says: seconds of a further layer, of the rest, of the head, the longest wait;
    bytes that a further layer keeps of a microbatch, and of parameters and their state."""

    layer: float = 0.0
    rest: float = 0.0
    head: float = 0.0
    cut: float = 0.0
    stash: float = 0.0
    static: float = 0.0


def work_probe(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
    """The work of a microbatch of a job."""
    whole = options.etp == 1 and options.tp > 1 and options.ep > 1
    data = options.ep // options.tp if whole else options.ep
    batch = microbatch_of(options, sizes) * data
    given: dict[str, Any] = {n: FLAGS[n].default for n in _OF_STEPS}
    if _recomputes_some(options):
        given["recompute"] = "none"  # the least time; nothing is said of what is kept
    return options.changed(**given | {"dp": data}, ranks=None, sizes=_sizes(options, batch))


def _recomputes_some(options: JobOptions) -> bool:
    """Whether layers differ in what is computed again."""
    return bool(options.recompute_layers or options.recompute_every)


def refined_probe(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions | None:
    """The work of a microbatch with what data-parallel ranks exchange for it; None where they
    exchange nothing for each microbatch."""
    if options.zero < 2:
        return None
    kept = ("dp", "dp_replicate", "dp_shard", "zero", "reshard_after_forward", "fsdp_prefetch")
    batch = microbatch_of(options, sizes) * data_ranks(options)
    given = {n: getattr(options, n) for n in kept}
    found = work_probe(options, sizes)
    return found.changed(**given, sizes=_sizes(options, batch))


def state_probe(options: JobOptions) -> JobOptions:
    """What stays in memory of a job: parameters, gradients and the state of the optimizer."""
    given: dict[str, Any] = {n: FLAGS[n].default for n in _OF_WORK}
    return options.changed(**given, ranks=None)


def _sizes(options: JobOptions, batch: int) -> dict[str, int | None]:
    return {**options.sizes, BATCH: batch}


@dataclass(frozen=True, slots=True)
class Asked:
    """A probe to be made on a machine: of the work of a microbatch, or of the state of a job."""

    options: JobOptions
    machine: Machine
    state: bool = False
    overlap: bool = True


def probe(asked: Asked) -> Probe:
    """Make a probe; one that says nothing if it is no job, or the model has no layers."""
    try:
        with kept_reports():
            return _state(asked) if asked.state else _work(asked)
    except (DiagnosticError, NotAnIntegerError):
        return Probe()


def _work(asked: Asked) -> Probe:
    jobs = [_job(asked.options, n, asked.options.sizes[BATCH] or 1) for n in _FEW]
    spans = [_spans(job, asked) for job in jobs]
    layer = max(0.0, _slope([s.whole for s in spans]))
    return Probe(
        layer,
        max(0.0, spans[0].whole - _FEW[0] * layer),
        min(s.head for s in spans),
        max(s.cut for s in spans),
        stash=max(0.0, _slope([float(j.figures().memory["others"]) for j in jobs])),
    )


def _state(asked: Asked) -> Probe:
    batch = data_ranks(asked.options)
    return Probe(static=_slope([_static(_job(asked.options, n, batch)) for n in _FEW]))


def _slope(values: list[float]) -> float:
    return (values[1] - values[0]) / (_FEW[1] - _FEW[0])


def _job(options: JobOptions, layers: int, batch: int) -> CompiledJob:
    return CompiledJob.of(options.changed(sizes={**options.sizes, LAYERS: layers, BATCH: batch}))


def _static(job: CompiledJob) -> float:
    memory = job.figures().memory
    return float(sum(memory[n] for n in _STATIC))


@dataclass(frozen=True, slots=True)
class _Spans:
    whole: float
    head: float
    cut: float


def _spans(job: CompiledJob, asked: Asked) -> _Spans:
    """Seconds of a step up to the end of backward, between the layers of forward and those of
    backward, and the longest wait between two computations; the least of all classes."""
    issued = job.compiled.issued(job.values)
    step = step_time(issued, asked.machine.changed(_NO_HOST), overlap=asked.overlap)
    found = [_of_class(each) for each in step.classes]
    return _Spans(
        min(s.whole for s in found), min(s.head for s in found), max(s.cut for s in found)
    )


def _of_class(each: ClassReplay) -> _Spans:
    whole = last_forward = cut = 0
    first_backward: int | None = None
    before = 0
    for number, planned in enumerate(each.plan):
        costs, ends, base = each.pieces[number].costs, each.ends[number], each.bases[number]
        for step, cost, after in zip(planned.shape.steps, costs, ends, strict=True):
            node, end = step.node, base + after
            if not node.is_computation or node.phase == "optimizer":
                continue
            start = end - cost.time - cost.launch
            cut = max(cut, start - before)
            before = whole = end
            if "/L" in node.scope:
                if node.phase == "forward":
                    last_forward = end
                elif first_backward is None:
                    first_backward = start
    head = max(0, (first_backward or 0) - last_forward)
    return _Spans(whole / PICOSECONDS, head / PICOSECONDS, cut / PICOSECONDS)


# -- bounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model: how many are before those that are many, how many these are, and how
    many are after them."""

    before: int
    many: int
    after: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.before + self.many + self.after

    def of_parts(self, parts: Sequence[int]) -> list[int]:
        """Of the many, how many each part has."""
        found: list[int] = []
        start = 0
        for count in parts:
            first, last = max(start, self.before), min(start + count, self.before + self.many)
            found.append(max(0, last - first))
            start += count
        return found


def bounds_of(
    jobs: Sequence[JobOptions], layers: Layers, works: Sequence[Probe], states: Sequence[Probe]
) -> tuple[Floats, Floats]:
    """The bounds of seconds and of bytes of jobs, by the probes of each."""
    shape = _shapes(jobs, layers)

    def array(found: Sequence[Probe], name: str) -> Floats:
        return np.array([getattr(p, name) for p in found], dtype=np.float64)

    work = Work(
        *(array(works, name) for name in ("layer", "rest", "head", "cut")),
    )
    stash = array(works, "stash") * [not _recomputes_some(job) for job in jobs]
    return time_bound(work, shape), memory_bound(array(states, "static"), stash, shape)


def _shapes(jobs: Sequence[JobOptions], layers: Layers) -> Shape:
    known: dict[tuple[Any, ...], tuple[float, ...]] = {}
    rows: list[tuple[float, ...]] = []
    for job in jobs:
        key = job.schedule, size_of(job, "pp"), count_of(job), job.chunks, job.stage_layers
        if key not in known:
            known[key] = _laid_out(layers, *key)
        rows.append(known[key])
    return Shape(*np.array(rows, dtype=np.float64).reshape(-1, 8).T)


def _laid_out(
    layers: Layers, name: str, stages: int, count: int, given: int, cut: tuple[int, ...]
) -> tuple[float, ...]:
    """A row of `Shape`. Of a schedule of a plug-in nothing is known but the mean."""
    many = layers.many
    schedule: Schedule | None = SCHEDULES.get(name)
    if stages == 1:
        return many, 1, 1, count, 0, 0, many, many
    if schedule is None:
        return many, stages, given or 1, count, 0, 0, 0, 0
    chunks = given or schedule.default_chunks
    placement = schedule.placement(stages, chunks)
    depth = placement.depth
    try:
        parts = layers.of_parts(cut or evenly(layers.total, depth))
    except DiagnosticError:
        return many, stages, chunks, count, 0, 0, 0, 0
    own = [0] * stages
    for number, home in enumerate(placement.homes):
        own[home.rank] += parts[number % depth]
    if placement.copies > 1:  # each copy runs some of the microbatches
        return many, stages, chunks, count, 0, 0, min(own), 0
    in_order = placement == round_robin(stages, chunks) and not schedule.splits_weight_gradient
    fills = [sum(parts[:rank]) if in_order else 0 for rank in range(stages)]
    busy = [count * mine + fill for mine, fill in zip(own, fills, strict=True)]
    head = placement.homes[depth - 1].rank
    return (
        *(many, stages, chunks, count, max(busy), busy[head], own[0]),
        _stashes(schedule, stages, count, chunks, parts) if in_order else 0,
    )


def _stashes(
    schedule: Schedule, stages: int, count: int, chunks: int, parts: Sequence[int]
) -> float:
    """Layers of microbatches that the first rank keeps at once."""
    form = schedule.closed_form(stages, count, chunks)
    if form.in_flight is None:
        return 0.0
    return float(form.in_flight[0] * chunks * min(parts[::stages]))
