"""Compiles distinct steps of serving, once for all steps with the same decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Protocol

from stagec.analysis.family import Compiled, Compiles
from stagec.ir.serving_step import MIXED
from stagec.jobs.builder import JobBuilder
from stagec.jobs.figures import CompiledJob, compiled_of
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.program.classes import RankClass
from stagec.serving.step import SequenceClass, Step
from stagec.serving.step_times import SECOND
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.ir.module import Module
    from stagec.jobs.lowered import LoweredJob
    from stagec.machines import Machine
    from stagec.serving.stepped import StepTime
    from stagec.time.costs.replay_options import ReplayOptions

_ANY = Step((SequenceClass(1, 1, 1),))


class ServedSteps(Protocol):
    """The steps of a model of a server. `builder` has its model, sizes and strategy; `groups` of
    its `ranks` have sequences of their own, which `replicas` of the server share."""

    builder: JobBuilder

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        ...

    @property
    def groups(self) -> int:
        """The number of groups of ranks with sequences of their own."""
        ...

    @property
    def replicas(self) -> Sequence[Mapping[str, int]]:
        """The coordinates of each replica of the server."""
        ...

    def apart(self, step: Step) -> Sequence[Step]:
        """The steps in which the server runs the classes of a step."""
        ...

    def compiled(self, step: Step) -> CompiledJob | LoweredJob:
        """A step. Raises `DiagnosticError`."""
        ...


def groups_in(module: Module) -> int:
    """The number of groups of ranks of a pod with their own sequences, times the microbatches of a
    step and the parts of a batch that take turns."""
    strategy = read_strategy(module)
    return strategy.ranks_of(strategy.batch, module.mesh) * strategy.turns


class StepModules:
    """Compiles the steps of a job. `builder` has its model, sizes and strategy, with a placeholder
    as the step. On pipeline stages a step is one microbatch; alternating microbatches (`--afd`) are
    groups with sequences of their own instead."""

    def __init__(self, options: JobOptions, session: Session) -> None:
        count = FLAGS["microbatches"]
        stages = 1 if options.afd else options.pp  # stages with steps of their own
        if stages > 1 and count.is_default(options.microbatches):
            options = options.changed(microbatches=1)
        elif stages > 1 and options.microbatches != 1:
            raise error(
                "--microbatches cannot be used with several steps of a pipeline: each step is a "
                "microbatch",
                remedy="leave out --microbatches",
            )
        self._options, self._session = options, session
        aside = session.aside()
        self.builder = self.builder_of(_ANY, aside)
        session.report(*(d for d in aside.diagnostics if d.severity != "remark"))
        self._by_structure: dict[object, Compiles] = {}

    def builder_of(self, step: Step, session: Session) -> JobBuilder:
        """The builder of a step. Raises `DiagnosticError`."""
        plain = dict.fromkeys(("batch", "prompt", "context", "chunk", "speculative"))
        return JobBuilder(self._options.changed(serve=MIXED, step=str(step), **plain), session)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(self.builder.module.axis_sizes.values())

    def apart(self, step: Step) -> Sequence[Step]:
        """The step itself."""
        return [step]

    @property
    def compiles(self) -> int:
        """The number of compiles so far."""
        return sum(map(len, self._by_structure.values()))

    @property
    def local_groups(self) -> int:
        """The number of groups of sequences on a rank."""
        return self.groups // self._split

    @property
    def groups(self) -> int:
        """The number of groups of ranks with sequences of their own."""
        module = self.builder.module
        return module.env[read_strategy(module).batch]

    @property
    def _split(self) -> int:
        """The number of ranks over which sequences are split."""
        module = self.builder.module
        strategy = read_strategy(module)
        return strategy.ranks_of(strategy.batch, module.mesh)

    @property
    def replicas(self) -> Sequence[Mapping[str, int]]:
        """The coordinates of each replica of the server. No collective or message joins ranks of
        two replicas; the groups of one replica wait for each other. Raises `DiagnosticError`."""
        return self._replicas

    @cached_property
    def _replicas(self) -> Sequence[Mapping[str, int]]:
        env, strategy = self.builder.module.env, read_strategy(self.builder.module)
        own: tuple[str, ...] = strategy.axes_of(strategy.batch)
        for each in self.classes(_ANY) if self._split > 1 else ():
            met = {a for group in each.groups for a in group.axes}
            met |= {axis for _, axis, _ in each.ways} | each.coords.keys()
            own = tuple(a for a in own if a not in met)
        coords = product(*(range(env[a]) for a in own))
        return [dict(zip(own, each, strict=True)) for each in coords]

    def compiled(self, step: Step, *, figures: bool = False) -> CompiledJob:
        """A step, compiled once for all steps with the same decisions; with `figures` from a
        compile that has figures. Raises `DiagnosticError`."""
        serving = self.builder.serving
        sequence = serving.sequence if serving is not None else "S"
        values = {**self.builder.module.env, **step.values(sequence)}
        compiles = self._by_structure.setdefault(step.structure, Compiles())
        compiled = compiles.find(values, lambda: self._compile(step), figures=figures)
        again = partial(self.compiled, step, figures=True)
        return CompiledJob(self.builder.model_name, compiled, values, again)

    def classes(self, step: Step) -> Sequence[RankClass]:
        """The rank classes of a step. Raises `DiagnosticError`."""
        job = self.compiled(step)
        return job.compiled.classes(job.values)

    def _compile(self, step: Step) -> Compiled:
        aside = self._session.aside()
        compiled = compiled_of(self.builder_of(step, aside))
        for warning in (*aside.diagnostics, *compiled.diagnostics):
            if warning.severity != "remark" and not self.compiles:
                self._session.report(warning)
        return compiled


def step_times(
    modules: StepModules, machine: Machine, replay: ReplayOptions, depth: int
) -> StepTime:
    """The times of the steps of a job on `depth` pipeline stages. Engines compute the attention of
    all sequences that decode in one kernel, and that of all prompts in another one, so these are
    one class each (`Step.together`)."""

    from stagec.analysis.serving_rates import step_pace

    @cache
    def times(step: Step) -> tuple[int, int]:
        report = modules.compiled(step).time(machine, replay)
        pace = step_pace(report.breakdown, depth) if depth > 1 else report.step_seconds
        return max(1, round(report.step_seconds * SECOND)), max(1, round(pace * SECOND))

    return lambda step: times(step.together())
