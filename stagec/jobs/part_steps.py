"""The steps of a server whose feed-forward has ranks of its own."""

from collections.abc import Mapping, Sequence
from math import lcm, prod

from stagec.ir.serving_step import DECODE, PREFILL
from stagec.jobs.lowered import LoweredJob
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.step_modules import groups_in
from stagec.serving.step import SequenceClass, Step, step_of


class PartSteps:
    """Compiles the steps of a job with a part of feed-forward (`ServedSteps`). `builder` is that of
    the pod with attention."""

    def __init__(self, options: JobOptions, session: Session) -> None:
        self._options = options
        pods = Pods.of(self._with(SequenceClass(1, 1, 1), None), session.aside())
        self.builder = pods.first
        modules = pods.modules.values()
        self.ranks = sum(prod(each.axis_sizes.values()) for each in modules)
        # as many as every pod can distribute evenly
        self.groups = lcm(*map(groups_in, modules))

    @property
    def replicas(self) -> Sequence[Mapping[str, int]]:
        """One: all ranks with attention meet those with feed-forward."""
        return [{}]

    def apart(self, step: Step) -> Sequence[Step]:
        """A step for each class, since pods decode or prefill."""
        return [step_of([each]) for each in step.classes]

    def compiled(self, step: Step) -> LoweredJob:
        """A step of one class. Raises `DiagnosticError`."""
        (each,) = step.classes
        return LoweredJob.of(self._with(each, each.count * self.groups), Session(), figures=True)

    def _with(self, each: SequenceClass, batch: int | None) -> JobOptions:
        """The options of a step of this class with `batch` sequences."""
        plain = dict.fromkeys(("chunk", "speculative", "step", "prompt"))
        step = {"serve": DECODE, "context": max(1, each.cached)}
        if each.kind != "decode":
            step = {"serve": PREFILL, "context": each.cached, "prompt": each.new}
        return self._options.changed(**{**plain, **step, "batch": batch})
