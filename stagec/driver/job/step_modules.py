"""Distinct steps of serving, compiled: once for all that are decided alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.driver.job.builder import JobBuilder
from stagec.driver.output.common import kept_reports, report
from stagec.driver.request.flags import FLAGS
from stagec.driver.request.options import JobOptions
from stagec.ir.decisions import Decisions
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.serving import MIXED
from stagec.ir.types import axis_size
from stagec.pipeline.instrument import Hooks, Verification
from stagec.pipeline.passes import Pass
from stagec.program.classes import RankClass, rank_classes
from stagec.serving.step import SequenceClass, Step
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error

_ANY = Step((SequenceClass(1, 1, 1),))


class _Watch(Hooks):
    """Watches what passes read."""

    def __init__(self) -> None:
        self.decisions = Decisions()

    def before_pass(self, pass_: Pass, module: Module) -> None:
        module.decisions = self.decisions

    def after_pass(self, pass_: Pass, module: Module) -> None:
        module.decisions = None


@dataclass(frozen=True)
class _Compiled:
    step: Step
    decisions: Decisions
    module: Module


class StepModules:
    """Compiles the steps of a job. `builder` knows its model, sizes and strategy; the step that it
    would compile is no one's. On pipeline stages a step is one microbatch."""

    def __init__(self, options: JobOptions) -> None:
        count = FLAGS["microbatches"]
        if options.pp > 1 and count.is_default(options.microbatches):
            options = options.changed(microbatches=1)
        elif options.pp > 1 and options.microbatches != 1:
            raise error(
                "steps that follow each other are the microbatches of a pipeline",
                remedy="leave out --microbatches",
            )
        self._options = options
        with kept_reports() as told:
            self.builder = self.builder_of(_ANY)
        for warning in (d for d in told if d.severity != "remark"):
            report(warning)
        self._made: list[_Compiled] = []

    def builder_of(self, step: Step) -> JobBuilder:
        """The builder of a step. Raises `DiagnosticError`."""
        plain = dict.fromkeys(("batch", "prompt", "context", "chunk", "speculative"))
        return JobBuilder(self._options.changed(serve=MIXED, step=str(step), **plain))

    @property
    def compiles(self) -> int:
        """How many compiles there were."""
        return len(self._made)

    @property
    def local_groups(self) -> int:
        """The groups of sequences on a rank: those that are not split over ranks."""
        module = self.builder.module
        strategy = read_strategy(module)
        over = [a for r in strategy.splits if strategy.batch in r.dims for a in r.over]
        return module.env[strategy.batch] // evaluate(axis_size(over), module.env)

    def classes(self, step: Step) -> Sequence[RankClass]:
        """The rank classes of a step. Raises `DiagnosticError`."""
        serving = self.builder.serving
        values = step.values(serving.sequence if serving is not None else "S")
        for found in self._made:
            if found.step.structure == step.structure:
                every = {**found.module.env, **values}
                if found.decisions.same(every):
                    found.module.set_values(values)
                    return rank_classes(found.module)
        watch = _Watch()
        with kept_reports() as told:
            module = self.builder_of(step).lower(watching=[watch, Verification()], verify=False)
        for warning in (d for d in told if d.severity != "remark" and not self._made):
            report(warning)
        self._made.append(_Compiled(step, watch.decisions, module))
        return rank_classes(module)
