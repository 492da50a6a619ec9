"""The time of a step as plain data, the object of `stagec time --json`, and on machines that are
better in one respect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from stagec.analysis.memory_fit import MemoryFit
from stagec.ir.expr import Expr, UnboundError, evaluate
from stagec.ir.kernel import ON_HOST
from stagec.ir_spec.strategy.kernels import UNFUSED
from stagec.machines import Machine
from stagec.machines.placement import straddling
from stagec.program.nodes import Node
from stagec.support.diagnostics import error
from stagec.time.cautions import cautions, of_software
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.measured.tables import INTERPOLATED, MATCHED, NOT_FOUND
from stagec.time.path import critical_path
from stagec.time.step import Issued, IssuedStep, StepTime, step_time
from stagec.time.streams import PICOSECONDS

SCHEMA = 1
_FOUND = {"matched": MATCHED, "interpolated": INTERPOLATED, "modelled": NOT_FOUND}
#: The element types whose peak is that of utilizations, as in papers: the first available one.
_PEAKS = ("bf16", "f16", "f32")
#: The number of nodes beyond which levers are not timed by default, since they time a dozen steps.
_MANY = 100_000


@dataclass(frozen=True, slots=True)
class ClassTime:
    """A class of ranks: its end, and the breakdown of its time, which adds up to the step."""

    name: str
    ranks: int
    seconds: float
    breakdown: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PathPart:
    """Nodes of one kind on the critical path: their kind and number, and their seconds with the
    waits before them. The scheduler of a server, for which devices wait at the end of a step, has
    no node."""

    cls: str
    phase: str
    op: str
    part: str
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LeverTime:
    """The time of the step on a machine that is better in one respect."""

    name: str
    step_seconds: float
    speedup: float


@dataclass(frozen=True)
class TimeReport:
    """The time of a step, with its breakdown.

    `mfu` and `hfu` are model FLOPs and executed FLOPs of products and attention, relative to those
    of all ranks at the peak `peak_flops`. `costed_by`, which JSON calls `found`, counts distinct
    kernels and collectives by the source of their times: `matched` and `interpolated` in measured
    tables, or `modelled`. Tokens and model FLOPs are None if a job has none. `used_ranks` has the
    levels of the network of which the job uses fewer ranks than a unit joins. `cautions` are
    assumptions and limitations of the time. `attention` is the attention kernel that the software
    states, if any.
    """

    model: str
    machine: str
    ranks: int
    mesh: Mapping[str, int]
    step_seconds: float
    tokens: int | None
    tokens_per_second: float | None
    tokens_per_second_per_rank: float | None
    model_flops: int | None
    executed_flops: int
    peak_flops: float
    mfu: float | None
    hfu: float
    levers: tuple[LeverTime, ...]
    costed_by: Mapping[str, int]
    used_ranks: Mapping[str, int]
    cautions: tuple[str, ...]
    attention: str
    ranks_of_classes: Sequence[int] = field(repr=False)
    step: StepTime = field(repr=False, compare=False)
    planned: Callable[[], MemoryFit | None] = field(repr=False, compare=False)

    @cached_property
    def fit(self) -> MemoryFit | None:
        """Whether the job fits the memory of the machine: `fits`, the bytes of its `peak`, the
        `room`, and the difference `by`; None if memory was not planned."""
        return self.planned()

    @cached_property
    def slowest(self) -> str:
        """The name of the slowest class."""
        return self.step.slowest.name

    @cached_property
    def breakdown(self) -> Mapping[str, float]:
        """Seconds of the slowest class by part, which add up to `step_seconds`."""
        return _seconds(self.step.parts(self.step.slowest))

    @cached_property
    def classes(self) -> tuple[ClassTime, ...]:
        """The classes of ranks."""
        each = zip(self.step.classes, self.ranks_of_classes, strict=True)
        return tuple(
            ClassTime(c.name, n, c.end / PICOSECONDS, _seconds(self.step.parts(c))) for c, n in each
        )

    @cached_property
    def critical_path(self) -> tuple[PathPart, ...]:
        """The critical path by class, phase and op, longest first."""
        return _path(self.step)

    def __getstate__(self) -> dict[str, Any]:
        """Its figures, for a pickle: without the compiled step, which they come from."""
        names = ("slowest", "breakdown", "fit", "classes", "critical_path")
        figures = {name: getattr(self, name) for name in names}
        return {**vars(self), **figures, "step": None, "planned": None}

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        data: dict[str, Any] = {"schema": SCHEMA}
        hidden = ("step", "ranks_of_classes", "planned", "attention")
        shown = [f.name for f in fields(TimeReport) if f.name not in hidden]
        before = shown.index("levers")
        shown[before:before] = "slowest", "breakdown"
        data |= {"found" if n == "costed_by" else n: getattr(self, n) for n in shown}
        data["cautions"] = [*self.cautions]
        data |= {"attention": self.attention} if self.attention else {}
        data["fit"] = None if self.fit is None else self.fit.as_json()
        data["classes"] = [asdict(each) for each in self.classes]
        data["levers"] = [asdict(each) for each in self.levers]
        data["critical_path"] = [
            {"class" if n == "cls" else n: v for n, v in asdict(part).items()}
            for part in self.critical_path
        ]
        return data


def time_report(
    model: str,
    issued: IssuedStep,
    machine: Machine,
    values: Mapping[str, int],
    *,
    model_flops: Expr | None,
    tokens: Expr | None,
    replay: ReplayOptions,
    levers: bool | None,
    fit: Callable[[], MemoryFit | None],
) -> TimeReport:
    """The report of a step on a machine. `model_flops` and `tokens` are those of a step of all
    ranks, in symbols and axes with these `values`; tokens with an open size are unknown. `levers`
    says whether to time better machines, None for steps of few nodes only. `fit` computes lazily
    whether the job fits. Raises `DiagnosticError`."""
    machines = [job.software.machine_of(machine) for job in issued.jobs]
    unlike = any(job.software.machine for job in issued.jobs)
    if unlike:
        _check_one(replay, levers)
        levers = False
    step = step_time(issued, machine, replay)
    if levers is None:
        levers = step.classes.graph.count <= _MANY
    tried = all_levers(issued, machine, replay) if levers else ()
    members = [each for job in issued.jobs for each in job.members]
    seconds, ranks = step.seconds, sum(map(len, members))
    needed = None if model_flops is None else evaluate(model_flops, values)
    read = _known(tokens, values)
    on = list(zip(issued.jobs, machines, strict=True))
    peak = _peak(machine)
    if unlike:
        peak = sum(_peak(own) * sum(map(len, job.members)) for job, own in on) / ranks
    available = ranks * peak * seconds
    every = iter(step.devices.graph.classes)
    executed = sum(
        len(each) * job.executed(number, next(every), _product_flops)
        for job in issued.jobs
        for number, each in enumerate(job.members)
    )
    used = (level for job, own in on for level in own.for_mesh(job.mesh).network)
    kernels = list(dict.fromkeys(filter(None, (_attention(job, own) for job, own in on))))
    return TimeReport(
        model=model,
        machine=" and ".join(dict.fromkeys(each.name for each in machines)),
        ranks=ranks,
        mesh=dict(issued.mesh),
        step_seconds=seconds,
        tokens=read,
        tokens_per_second=None if read is None else read / seconds,
        tokens_per_second_per_rank=None if read is None else read / seconds / ranks,
        model_flops=needed,
        executed_flops=executed,
        peak_flops=peak,
        mfu=None if needed is None else needed / available,
        hfu=executed / available,
        levers=tuple(LeverTime(n, s.seconds, seconds / s.seconds) for n, s in tried),
        costed_by={name: step.ways.get(way, 0) for name, way in _FOUND.items()},
        used_ranks={e.name: e.used for e in used if e.used not in (None, e.ranks)},
        cautions=tuple(_cautions(on)),
        attention=", ".join(kernels),
        ranks_of_classes=[len(each) for each in members],
        step=step,
        planned=fit,
    )


def _check_one(replay: ReplayOptions, levers: bool | None) -> None:
    """Raise `DiagnosticError` for what is about the one machine of a step, whose pods have several
    (`stg.machine`)."""
    for given, what in ((levers, "--levers"), (replay.measured, "measured kernels")):
        if given:
            raise error(
                f"{what} cannot be used with --on-machine, with which a step has several machines",
                remedy=f"leave {what} out, or --on-machine",
            )


def _cautions(on: Sequence[tuple[Issued, Machine]]) -> Iterator[str]:
    """The cautions about each machine and the jobs that it runs."""
    machines = {own.name: own for _, own in on}
    for name, machine in machines.items():
        jobs = [job for job, own in on if own.name == name]
        yield from cautions(machine, [job.mesh for job in jobs])
        kernels = dict.fromkeys(filter(None, (_attention(job, machine) for job in jobs)))
        rules = [job.software.kernels for job in jobs]
        blocks = dict.fromkeys(kernel for rule in rules for kernel in (rule.blocks, rule.experts))
        yield from of_software(machine, kernels, blocks)


def _peak(machine: Machine) -> float:
    """The FLOP/s of utilizations; without any of `_PEAKS` the highest rate."""
    rates = {**machine.compute.vector, **machine.compute.matrix}
    peak = next((rates[d] for d in _PEAKS if d in rates), None)
    return peak.value if peak else max(rate.value for rate in rates.values())


def _attention(job: Issued, machine: Machine) -> str:
    """The attention kernel that the software chooses; empty for that of the machine, and for fused
    attention although the software states none."""
    name = job.software.attention_on(machine)
    kinds = {kernel.kind for node in job.samples for kernel in node.kernels}
    return "" if name in UNFUSED and "attention" in kinds else name


def _known(size: Expr | None, values: Mapping[str, int]) -> int | None:
    try:
        return None if size is None else evaluate(size, values)
    except UnboundError:
        return None


def _seconds(parts: Mapping[str, int]) -> dict[str, float]:
    return {part: time / PICOSECONDS for part, time in parts.items()}


def _product_flops(node: Node) -> int:
    return node.flops if node.kernel is not None and node.kernel.kind != "memory" else 0


def _path(step: StepTime) -> tuple[PathPart, ...]:
    nodes: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    times: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    for link in critical_path(step.classes):
        key = link.owner.name, link.node.phase, link.node.kind, link.part
        nodes[key] += 1
        times[key] += link.time
    if step.scheduler:  # no node waits for it
        times[step.slowest.name, "", step.behind, step.behind] = step.scheduler
    order = sorted(times, key=lambda key: (-times[key], key))
    return tuple(PathPart(*key, nodes[key], times[key] / PICOSECONDS) for key in order)


class Lever(NamedTuple):
    """The respect in which a machine is better, and the step on it."""

    name: str
    step: StepTime


def all_levers(
    issued: IssuedStep, machine: Machine, replay: ReplayOptions = USUAL
) -> Iterator[Lever]:
    """Steps with groups that do not cross a level without need, twice each rate, also of hosts
    whose memory is used, no latency, no launch gaps, and all communication hidden. Such machines
    were never measured: measured times are scaled by the ratio of the models on both machines."""
    if replay.measured is not None:
        replay = replace(replay, measured=replay.measured.of(machine))
    for name, changed in [*_placed(issued, machine), *_changed(machine), *_hosts(issued, machine)]:
        yield Lever(name, step_time(issued, changed, replay))
    at_once = machine.changed({"compute.launch": 0.0})
    yield Lever("no launch gaps", step_time(issued, at_once, replay, hosts=False))
    hidden = step_time(issued, machine, replay, communicates=False)
    yield Lever("communication all hidden", hidden)


def _placed(issued: IssuedStep, machine: Machine) -> Iterator[tuple[str, Machine]]:
    groups = (each for job in issued.jobs for each in straddling(machine, job.mesh))
    for each in dict.fromkeys(groups):
        used = {f"network.{each.level}.used": each.better}
        yield f"{each.better} ranks of each {each.level}", machine.changed(used)


def _changed(machine: Machine) -> Iterator[tuple[str, Machine]]:
    yield "2 x matrix rate", machine.scaled("compute.matrix", 2)
    yield "2 x memory bandwidth", machine.scaled("memory.bandwidth", 2)
    for level in machine.network:
        yield f"2 x {level.name}", machine.scaled(f"network.{level.name}.bandwidth", 2)
    yield "no latency", machine.changed({"network.latency": 0.0, "host.latency": 0.0})


def _hosts(issued: IssuedStep, machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Better hosts, for jobs that use their memory."""
    samples = [node for job in issued.jobs for node in job.samples]
    updates = any(kernel.form == ON_HOST for node in samples for kernel in node.kernels)
    if updates and machine.host.memory is not None:
        yield "2 x host memory bandwidth", machine.scaled("host.memory", 2)
    if updates or any(node.is_copy for node in samples):
        yield "2 x host link", machine.scaled("host.bandwidth", 2)
