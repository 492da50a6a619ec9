"""Probes of a search: small jobs that say what a microbatch takes and holds, for lower bounds.

A probe has the work of a microbatch: as many ranks as that is split over, one stage, one microbatch
and few layers; from two numbers of layers follows what each further layer adds. Of a model without
layers that are many (Gemma's are of two kinds, in turns) it has all layers. Many points of a space
share a probe, and probes share compiles.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from stagec.analysis.figures import OTHERS
from stagec.ir.module import BATCH
from stagec.jobs.figures import CompiledJob
from stagec.jobs.request.experts import tensor_ranks
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.machines import Machine
from stagec.searches.explore.layout import Layers
from stagec.searches.explore.pipelined import ActionTimes
from stagec.searches.probe_times import PHASES, Ran, action_times, span_of, tail_of, turn_of
from stagec.searches.space import data_ranks, microbatch_of
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.time.costs.nodes import CostTable
from stagec.time.costs.replay_options import ReplayOptions
from stagec.time.step import StepTime, step_time
from stagec.time.streams import PICOSECONDS

#: The symbol of the layers that are many, and how many of them probes have: as many as share a
#: compile with any larger number.
LAYERS, FEW = "L", (8, 12)
_STATIC = ("parameters", "gradients", "optimizer")
#: Flags of which a probe of the work of a microbatch has the default: they are about many
#: microbatches, stages or data-parallel ranks.
_OF_STEPS = (
    *("pp", "dp", "dp_replicate", "dp_shard", "schedule", "chunks", "stage_layers"),
    *("scatter_gather", "zero", "reshard_after_forward", "fsdp_prefetch", "microbatches"),
    *("overlap_param_gather", "ddp_bucket", "recompute_layers", "recompute_every"),
    *("shard_units", "shard_loss", "shard_copies", "shard_padding", "ddp_copies"),
)
#: What is moved to the host and back for each microbatch.
_ACTIVATIONS = "activations"
#: What is moved there once a step.
STATE = "optimizer"
#: Those of them of which it matters whether they are given.
RECOMPUTED = ("recompute_layers", "recompute_every")
#: The schedule of a probe of what stages hold, its stages, microbatches and chunks; the layers of
#: each that are many.
FOUR_STAGES, BETWEEN = (str(FLAGS["schedule"].default), 4, 2, 0), (1, *FEW, 1)
#: Flags of which a probe of the state of a job has the default: those of pipelines, and others.
_OF_PIPELINES = ("pp", "schedule", "chunks", "stage_layers", "scatter_gather", "microbatches")
_NOT_OF_STATE = (*_OF_PIPELINES, "recompute", *RECOMPUTED)


#: What ran of each class of a step.
_Classes: TypeAlias = Sequence[Ran]
What: TypeAlias = Literal["work", "state", "tail", "stages"]


def of_work(names: Iterable[str]) -> set[str]:
    """The flags on which a probe of the work of a microbatch depends, beside its size."""
    return {n for n in names if n not in _OF_STEPS or n in RECOMPUTED}


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe says: seconds of a further layer, of the rest, of the head, the longest waits
    before a computation of forward and of backward, seconds of a further layer on the stream of
    communication that it uses most, seconds from one microbatch to the next, of a further layer
    (`pace`) and the rest (`turn`); bytes that a further layer keeps of a microbatch, what is held
    beside them, and those of a further layer's parameters and their state: in the job, and those
    (`own`: parameters, gradients, state) of which no data-parallel rank has a part alone; those of
    all parameters and their state where no layers are many; the actions of a pipeline, and seconds
    of a further layer once all backward is done; bytes of parameters and their state on the first
    and the last stage of four, and what those between hold beside them, one with few layers and one
    with more; or why it is no job. `again` is no less than what a layer computes again: its forward
    is done twice then, so at most half. A flag that computes nothing again leaves all others as
    they are without it."""

    layer: float = 0.0
    rest: float = 0.0
    head: float = 0.0
    cut: float = 0.0
    back: float = 0.0
    link: float = 0.0
    pace: float = 0.0
    turn: float = 0.0
    stash: float = 0.0
    more: float = 0.0
    static: float = 0.0
    own: tuple[float, float, float] = (0.0, 0.0, 0.0)
    state: float = 0.0
    times: ActionTimes | None = None
    tail: float = 0.0
    ends: tuple[float, float] = (0.0, 0.0)
    beside: tuple[float, float] = (0.0, 0.0)
    refused: str = ""
    again: float = field(default=0.0, compare=False)

    @property
    def forward(self) -> float:
        """Seconds of a further layer of forward; 0 where nothing is known of it."""
        phase = self.times.phases[0] if self.times is not None else None
        return phase.layer if phase is not None else 0.0


def work_probe(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
    """The work of a microbatch of a job."""
    data = options.ep // tensor_ranks(options)
    batch = microbatch_of(options, sizes) * data
    given: dict[str, Any] = {n: FLAGS[n].default for n in _OF_STEPS}
    if options.fuse_gradients:  # no kernel casts what products add to sums
        given |= dict.fromkeys(("grad_dtype", "reduce_dtype"), options.param_dtype)
    if options.autocast or options.compute_dtype != FLAGS["compute_dtype"].default:
        given |= {n: FLAGS[n].default for n in ("autocast", "compute_dtype")}
        given["param_dtype"] = _computed_in(options)  # as if nothing was cast
    if _recomputes_some(options):
        given["recompute"] = "none"  # the least time; nothing is said of what is kept
    if options.serve is None and options.grad_dtype == options.reduce_dtype:
        # after backward, in the way of no microbatch; where they are cast first, all casts would be
        # held until then
        given["ddp_bucket"] = 0
    kept = [n.partition(":")[0].strip() for n in options.offload.split(",")]
    given["offload"] = _ACTIVATIONS if _ACTIVATIONS in kept else ""  # the rest is once a step
    return options.changed(**given | {"dp": data}, ranks=None, sizes=_sizes(options, batch))


def _computed_in(options: JobOptions) -> str:
    """The element type of products."""
    usual = FLAGS["compute_dtype"].default
    return options.compute_dtype if options.compute_dtype != usual else "bf16"


def _recomputes_some(options: JobOptions) -> bool:
    """Whether layers differ in what is computed again."""
    return any(getattr(options, name) for name in RECOMPUTED)


def refined_probe(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions | None:
    """The work of a microbatch with what data-parallel ranks exchange for it; None where they
    exchange nothing for each microbatch, or reduce gradients once."""
    if options.zero < 2 or options.grad_reduction in ("once", "staged" if options.pp > 1 else ""):
        return None
    kept = ("dp", "dp_replicate", "dp_shard", "zero", "reshard_after_forward", "fsdp_prefetch")
    batch = microbatch_of(options, sizes) * data_ranks(options)
    given = {n: getattr(options, n) for n in kept}
    probe_options = work_probe(options, sizes)
    return probe_options.changed(**given, sizes=_sizes(options, batch))


def state_probe(options: JobOptions) -> JobOptions:
    """What stays in memory of a job: parameters, gradients and the state of the optimizer."""
    given: dict[str, Any] = {n: FLAGS[n].default for n in _NOT_OF_STATE}
    return options.changed(**given, ranks=None)


def shared_state_probe(options: JobOptions) -> JobOptions:
    """One of which many jobs have the same state: sequences are not split. ZeRO shards a dimension
    over data-parallel ranks and those of a sequence at once, so it is the same over as many
    data-parallel ranks. Experts and groups of replicas have another one, and so may caches."""
    probe_options = state_probe(options)
    apart = options.ep > 1 or options.dp_replicate > 1 or options.dp_shard > 1
    if apart or options.mesh_order or options.serve is not None:
        return probe_options
    given: dict[str, Any] = {n: FLAGS[n].default for n in ("cp_mode", "cp_order")}
    return probe_options.changed(**given, dp=options.dp * options.cp, cp=1)


def stages_probe(options: JobOptions, sizes: Mapping[str, int], layers: Layers) -> JobOptions:
    """A job in four stages, the first of which has what is before the layers that are many, and
    the last what is after them; the second has few layers, the third more."""
    given: dict[str, Any] = {n: FLAGS[n].default for n in (*_OF_PIPELINES, *RECOMPUTED)}
    _, stages, count, _ = FOUR_STAGES
    batch = microbatch_of(options, sizes) * data_ranks(options) * count
    about = {"ranks": None, "pp": stages, "microbatches": count, "stage_layers": parts_of(layers)}
    return options.changed(**given | about, sizes=_sizes(options, batch) | {LAYERS: sum(BETWEEN)})


def parts_of(layers: Layers) -> tuple[int, ...]:
    """All layers of the stages of that job."""
    first, *between, last = BETWEEN
    return layers.before + first, *between, last + layers.after


def _sizes(options: JobOptions, batch: int) -> dict[str, int | None]:
    return {**options.sizes, BATCH: batch}


@dataclass(frozen=True, slots=True)
class Asked:
    """A probe to be made on a machine, of a model of these layers. `what` it is about: the work of
    a microbatch, the state of a job, in one stage or in four, or what follows the last
    microbatch."""

    options: JobOptions
    machine: Machine
    layers: Layers
    what: What = "work"
    overlap: bool = True


def probe(asked: Asked) -> Probe:
    """Make a probe; one that says nothing if it is no job."""
    makers = _OF_LAYERS if asked.layers.many else _OF_WHOLE
    try:
        return makers[asked.what](asked) if asked.what in makers else Probe()
    except DiagnosticError as problem:
        return Probe(refused=problem.diagnostics[0].message)
    except NotAnIntegerError:
        return Probe()


def _work(asked: Asked) -> Probe:
    jobs = _jobs(asked.options, asked.options.sizes[BATCH] or 1)
    steps = [_ran(step) for step in _steps(jobs, asked)]
    spans = [_spans(step) for step in steps]
    layer = max(0.0, _slope([s.whole for s in spans]))
    elapsed = Probe(
        layer,
        max(0.0, spans[0].whole - FEW[0] * layer),
        min(s.head for s in spans),
        max(s.cut for s in spans),
        max(s.back for s in spans),
        link=_link(spans) if asked.options.zero >= 2 else 0.0,
    )
    memory = [job.memory_figures().memory for job in jobs]
    kept = [float(each[OTHERS]) for each in memory]
    stash = max(0.0, _slope(kept))
    parameters, gradients, state = (_slope([float(m[n]) for m in memory]) for n in _STATIC)
    times = _times(steps, asked.layers.before)
    pace, turn = _turns(asked.options, steps)
    again = layer / 2 if asked.options.recompute != "none" else 0.0
    return replace(
        elapsed,
        stash=stash,
        more=max(0.0, kept[0] - FEW[0] * stash),
        own=(parameters, gradients, state),
        times=times,
        pace=pace,
        turn=turn,
        again=again,
    )


def _times(steps: Sequence[_Classes], before: int) -> ActionTimes | None:
    """The actions of a pipeline, if the nodes distinguish layers."""
    few, many = (
        [span_of(each, before, layers) for each in step]
        for step, layers in zip(steps, FEW, strict=True)
    )
    if None in few or None in many:
        return None
    one, two = ([s for s in spans if s is not None] for spans in (few, many))
    return action_times(one, two, FEW[1] - FEW[0])


def _link(spans: Sequence[_Spans]) -> float:
    """What a further layer takes on the stream that it uses most; gathers and reductions of
    parameters that are sharded are those of each microbatch."""
    streams = {stream for s in spans for stream in s.streams}
    slopes = [_slope([s.streams.get(stream, 0.0) for s in spans]) for stream in streams]
    return max([0.0, *slopes])


def _turns(options: JobOptions, steps: Sequence[_Classes]) -> tuple[float, float]:
    """Seconds from one microbatch to the next: of a further layer, and the rest. Parameters that
    stay gathered are gathered once a step, so that of the probe is not that of a step."""
    if options.zero < 2 or options.reshard_after_forward == "never":
        return 0.0, 0.0
    turns = [min(map(turn_of, step)) / PICOSECONDS for step in steps]
    return (layer := _slope(turns)), turns[0] - FEW[0] * layer


def _state(asked: Asked) -> Probe:
    jobs = _jobs(asked.options, data_ranks(asked.options))
    return Probe(static=_slope([_static(job.memory_figures().memory) for job in jobs]))


def _stages(asked: Asked) -> Probe:
    first, *between, last = CompiledJob.of(asked.options).memory_figures().by_stage
    few, many = (float(each[OTHERS]) for each in between)
    return Probe(ends=(_static(first), _static(last)), beside=(few, many))


def _tail(asked: Asked) -> Probe:
    steps = _steps(_jobs(asked.options, data_ranks(asked.options)), asked)
    return Probe(tail=max(0.0, _slope([min(map(tail_of, s.classes)) for s in steps])))


def _whole_work(asked: Asked) -> Probe:
    job = CompiledJob.of(asked.options)
    (step,) = _steps([job], asked)
    span, kept = _spans(_ran(step)), job.memory_figures().memory[OTHERS]
    return Probe(rest=span.whole, head=span.head, cut=span.cut, back=span.back, more=float(kept))


def _whole_state(asked: Asked) -> Probe:
    sizes = _sizes(asked.options, data_ranks(asked.options))
    job = CompiledJob.of(asked.options.changed(sizes=sizes))
    return Probe(state=_static(job.memory_figures().memory))


_OF_LAYERS = {"work": _work, "state": _state, "tail": _tail, "stages": _stages}
_OF_WHOLE = {"work": _whole_work, "state": _whole_state}


def _slope(values: list[float]) -> float:
    return (values[1] - values[0]) / (FEW[1] - FEW[0])


def _jobs(options: JobOptions, batch: int) -> list[CompiledJob]:
    """The job with few layers, and with more."""
    few, many = (options.changed(sizes={**options.sizes, LAYERS: n, BATCH: batch}) for n in FEW)
    job = CompiledJob.of(few)
    more, again = {**job.values, LAYERS: FEW[1]}, partial(CompiledJob.of, many, figures=True)
    like = job.compiled.decisions.same(more)
    return [job, replace(job, values=more, again=again) if like else CompiledJob.of(many)]


def _static(memory: Mapping[str, int]) -> float:
    return float(sum(memory[n] for n in _STATIC))


@dataclass(frozen=True, slots=True)
class _Spans:
    streams: Mapping[Hashable, float]
    whole: float
    head: float
    cut: float
    back: float


class _OneTable:
    """Makes one table of costs for jobs that differ in layers alone: on one mesh, by one
    software."""

    def __init__(self) -> None:
        self._made: tuple[Any, CostTable] | None = None

    def __call__(self, machine: Machine, **how: Any) -> CostTable:
        about = how["mesh"], how["software"]
        if self._made is None or self._made[0] != about:
            self._made = about, CostTable(machine, **how)
        return self._made[1]


def _steps(jobs: Iterable[CompiledJob], asked: Asked) -> Iterator[StepTime]:
    """The replays of probes by the clock of the devices; that of the hosts can only make a step
    longer."""
    table, replay = _OneTable(), ReplayOptions(asked.overlap)
    for job in jobs:
        issued = job.compiled.issued(job.values)
        yield step_time(issued, asked.machine, replay, hosts=False, table=table)


def _ran(step: StepTime) -> _Classes:
    return [Ran(each) for each in step.classes]


def _spans(step: _Classes) -> _Spans:
    """Seconds of a step up to the end of backward, between the layers of forward and those of
    backward, and the longest wait between two computations; the least of all classes."""
    spans = [_of_class(each) for each in step]
    streams = {stream for s in spans for stream in s.streams}
    return _Spans(
        {stream: min(s.streams.get(stream, 0.0) for s in spans) for stream in streams},
        min(s.whole for s in spans),
        min(s.head for s in spans),
        max(s.cut for s in spans),
        max(s.back for s in spans),
    )


def _of_class(ran: Ran) -> _Spans:
    nodes, starts, ends = ran.nodes, ran.starts, ran.ends
    used = {s: int((ends[of] - starts[of]).sum()) for s, of in nodes.communication.items()}
    steps = nodes.computations[nodes.phase[nodes.computations] >= 0]
    phases = nodes.phase[steps]
    waits = starts[steps] - np.append([0], ends[steps[:-1]])[: len(steps)]
    cuts = [int(waits[phases == phase].max(initial=0)) for phase in PHASES]
    whole = int(ends[steps[-1]]) if len(steps) else 0
    forward, backward = map(nodes.visits, PHASES)
    first_backward = ran.start[backward[0][0]] if backward else 0
    head = max(0, first_backward - (ran.end[forward[-1][1]] if forward else 0))
    times = (time / PICOSECONDS for time in (whole, head, *cuts))
    return _Spans({stream: time / PICOSECONDS for stream, time in used.items()}, *times)
