"""Probes of a search: small jobs whose time and memory give lower bounds of those of many jobs.

A probe has the work of a microbatch: the ranks that share it, one stage, one microbatch and few
layers. Two probes with different numbers of layers give what each further layer adds. For a model
without one kind of repeated layers (Gemma alternates two kinds) a probe has all layers. Many points
of a space share a probe, and probes share compiles.
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

#: The symbol of the number of repeated layers, and the two numbers in probes: both share a compile
#: with any larger number.
LAYERS, FEW = "L", (8, 12)
_STATIC = ("parameters", "gradients", "optimizer")
#: Flags that have their defaults in a probe of the work of a microbatch, since they concern several
#: microbatches, stages or data-parallel ranks.
_OF_STEPS = (
    *("pp", "dp", "dp_replicate", "dp_shard", "schedule", "chunks", "stage_layers"),
    *("scatter_gather", "zero", "reshard_after_forward", "fsdp_prefetch", "microbatches"),
    *("overlap_param_gather", "ddp_bucket", "recompute_layers", "recompute_every"),
    *("shard_units", "shard_loss", "shard_copies", "shard_padding", "ddp_copies"),
    "ddp_views",
)
#: The value of --offload that moves data to the host and back for each microbatch.
_ACTIVATIONS = "activations"
#: The value of --offload that moves data once a step.
STATE = "optimizer"
#: Flags of `_OF_STEPS` on which a probe depends all the same.
RECOMPUTED = ("recompute_layers", "recompute_every")
#: The schedule, stages, microbatches and chunks of the probe of the memory of stages, and the
#: repeated layers of each stage.
FOUR_STAGES, BETWEEN = (str(FLAGS["schedule"].default), 4, 2, 0), (1, *FEW, 1)
#: Flags that have their defaults in a probe of the state of a job: those of pipelines, and others.
_OF_PIPELINES = ("pp", "schedule", "chunks", "stage_layers", "scatter_gather", "microbatches")
_NOT_OF_STATE = (*_OF_PIPELINES, "recompute", *RECOMPUTED)


#: The nodes of each class of a step with their times.
_Classes: TypeAlias = Sequence[Ran]
#: The kind of a probe.
What: TypeAlias = Literal["work", "state", "tail", "stages"]


def of_work(names: Iterable[str]) -> set[str]:
    """The flags on which a probe of the work of a microbatch depends, in addition to its size."""
    return {n for n in names if n not in _OF_STEPS or n in RECOMPUTED}


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe; 0 in fields that its kind does not determine.

    Seconds: `layer`, `rest`, `head`, `cut`, `back`, `link`, `pace`, `turn` and `again` as in
    `explore.bounds.Work`; `times` of the actions of a pipeline; `tail`, a further layer after the
    last backward. `again` is at most half of a layer, since its forward runs twice then; it is not
    compared, so that two probes are equal if a flag recomputes nothing.

    Bytes: `stash`, the activations of a further layer; `more`, all else that is not static;
    `static`, the parameters of a further layer with their gradients and state; `own`, the three of
    them if data-parallel ranks do not share them; `state`, the static memory of all layers, for a
    model without repeated layers; `ends`, the static memory of the first and the last of four
    stages; `beside`, the other memory of the two stages between, with few layers and with more.

    `refused` is the message with which the compiler refuses the job.
    """

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
        """Seconds of the forward of a further layer; 0 if not known."""
        phase = self.times.phases[0] if self.times is not None else None
        return phase.layer if phase is not None else 0.0


def work_probe(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
    """The options of a probe of the work of a microbatch of a job."""
    data = options.ep // tensor_ranks(options)
    batch = microbatch_of(options, sizes) * data
    given: dict[str, Any] = {n: FLAGS[n].default for n in _OF_STEPS}
    if options.fuse_gradients:  # no kernel casts what products add to sums
        given |= dict.fromkeys(("grad_dtype", "reduce_dtype"), options.param_dtype)
    if options.autocast or options.compute_dtype != FLAGS["compute_dtype"].default:
        given |= {n: FLAGS[n].default for n in ("autocast", "compute_dtype")}
        given["param_dtype"] = _computed_in(options)  # as if nothing was cast
    if _recomputes_some(options):
        given["recompute"] = "none"  # the least time; the probe gives no bound of activations
    if options.serve is None and options.grad_dtype == options.reduce_dtype:
        # reduced after backward, where it delays no microbatch; if gradients are cast first, all
        # casts would stay in memory until then
        given["ddp_bucket"] = 0
    offloaded = [n.partition(":")[0].strip() for n in options.offload.split(",")]
    given["offload"] = _ACTIVATIONS if _ACTIVATIONS in offloaded else ""  # others move once a step
    return options.changed(**given | {"dp": data}, ranks=None, sizes=_sizes(options, batch))


def _computed_in(options: JobOptions) -> str:
    """The element type of products."""
    usual = FLAGS["compute_dtype"].default
    return options.compute_dtype if options.compute_dtype != usual else "bf16"


def _recomputes_some(options: JobOptions) -> bool:
    """Whether layers differ in recomputation."""
    return any(getattr(options, name) for name in RECOMPUTED)


def refined_probe(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions | None:
    """The options of a probe of the work of a microbatch with the communication of data-parallel
    ranks; None if there is none for each microbatch, or if gradients are reduced once."""
    if options.zero < 2 or options.grad_reduction in ("once", "staged" if options.pp > 1 else ""):
        return None
    shards = ("dp", "dp_replicate", "dp_shard", "zero", "reshard_after_forward", "fsdp_prefetch")
    batch = microbatch_of(options, sizes) * data_ranks(options)
    given = {n: getattr(options, n) for n in shards}
    probe_options = work_probe(options, sizes)
    return probe_options.changed(**given, sizes=_sizes(options, batch))


def state_probe(options: JobOptions) -> JobOptions:
    """The options of a probe of the static memory of a job: parameters, gradients and the state of
    the optimizer."""
    given: dict[str, Any] = {n: FLAGS[n].default for n in _NOT_OF_STATE}
    return options.changed(**given, ranks=None)


def shared_state_probe(options: JobOptions) -> JobOptions:
    """The options of a probe of the static memory that more jobs share, with data parallelism in
    place of context parallelism: ZeRO shards a dimension over both at once. With experts, groups of
    replicas, or caches the memory may differ, so these keep `state_probe`."""
    probe_options = state_probe(options)
    differs = options.ep > 1 or options.dp_replicate > 1 or options.dp_shard > 1
    if differs or options.mesh_order or options.serve is not None:
        return probe_options
    given: dict[str, Any] = {n: FLAGS[n].default for n in ("cp_mode", "cp_order")}
    return probe_options.changed(**given, dp=options.dp * options.cp, cp=1)


def stages_probe(options: JobOptions, sizes: Mapping[str, int], layers: Layers) -> JobOptions:
    """The options of a probe in four stages. The first one has all that is before the repeated
    layers, the last one all that is after them; the second has few repeated layers, the third
    more."""
    given: dict[str, Any] = {n: FLAGS[n].default for n in (*_OF_PIPELINES, *RECOMPUTED)}
    _, stages, count, _ = FOUR_STAGES
    batch = microbatch_of(options, sizes) * data_ranks(options) * count
    about = {"ranks": None, "pp": stages, "microbatches": count, "stage_layers": parts_of(layers)}
    return options.changed(**given | about, sizes=_sizes(options, batch) | {LAYERS: sum(BETWEEN)})


def parts_of(layers: Layers) -> tuple[int, ...]:
    """The number of layers of each stage of `stages_probe`."""
    first, *between, last = BETWEEN
    return layers.before + first, *between, last + layers.after


def _sizes(options: JobOptions, batch: int) -> dict[str, int | None]:
    return {**options.sizes, BATCH: batch}


@dataclass(frozen=True, slots=True)
class Asked:
    """A probe to make on a machine, for a model with these layers. Its kind is `what`: the work of
    a microbatch, the state of a job, the memory of four stages, or the end of a step."""

    options: JobOptions
    machine: Machine
    layers: Layers
    what: What = "work"
    overlap: bool = True


def probe(asked: Asked) -> Probe:
    """Make a probe; it is empty, or has `refused`, if its job is invalid."""
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
    """The times of the actions of a pipeline; None if nodes do not distinguish layers."""
    few, many = (
        [span_of(each, before, layers) for each in step]
        for step, layers in zip(steps, FEW, strict=True)
    )
    if None in few or None in many:
        return None
    one, two = ([s for s in spans if s is not None] for spans in (few, many))
    return action_times(one, two, FEW[1] - FEW[0])


def _link(spans: Sequence[_Spans]) -> float:
    """Seconds of a further layer on the stream of communication that it uses most."""
    streams = {stream for s in spans for stream in s.streams}
    slopes = [_slope([s.streams.get(stream, 0.0) for s in spans]) for stream in streams]
    return max([0.0, *slopes])


def _turns(options: JobOptions, steps: Sequence[_Classes]) -> tuple[float, float]:
    """Seconds from one microbatch to the next, for a further layer and for the rest. 0 where
    parameters stay gathered: they are gathered once a step, not for each microbatch."""
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
    """The job with few layers and with more, from one compile if possible."""
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
    """Makes one cost table for jobs that differ in layers alone, with one mesh and one software."""

    def __init__(self) -> None:
        self._last: tuple[Any, CostTable] | None = None

    def __call__(self, machine: Machine, **how: Any) -> CostTable:
        about = how["mesh"], how["software"]
        if self._last is None or self._last[0] != about:
            self._last = about, CostTable(machine, **how)
        return self._last[1]


def _steps(jobs: Iterable[CompiledJob], asked: Asked) -> Iterator[StepTime]:
    """The replays of probes with the clock of devices; that of hosts can only make a step
    longer."""
    table, replay = _OneTable(), ReplayOptions(asked.overlap)
    for job in jobs:
        issued = job.compiled.issued(job.values)
        yield step_time(issued, asked.machine, replay, hosts=False, table=table)


def _ran(step: StepTime) -> _Classes:
    return [Ran(each) for each in step.classes]


def _spans(step: _Classes) -> _Spans:
    """Seconds of a step up to the end of backward, of the head between the layers of forward and of
    backward, and the longest waits between two computations: the least times of all classes, and
    the largest waits."""
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
