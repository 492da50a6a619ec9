"""What every rank holds at its worst moment, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from stagec.analysis.memory_fit import MemoryFit
from stagec.driver.job.builder import JobBuilder, model_name
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import has_pods, options_of, pod_names
from stagec.driver.job.pods import lower_pods
from stagec.driver.memory.picture import Drawing, memory_page
from stagec.driver.output.common import report
from stagec.driver.output.report import Report
from stagec.driver.request.limit import Limit
from stagec.driver.request.options import JobOptions
from stagec.pipeline.instrument import PLAN


@dataclass(frozen=True)
class MemoryPlan(Report):
    """The footprint of a job: the object of `stagec memory --json`. `builder` has the planned
    module, `drawing` says how its page looks."""

    data: Mapping[str, Any]
    builder: JobBuilder = field(repr=False, compare=False)
    drawing: Drawing = field(default=Drawing(), repr=False, compare=False)

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        """The classes of ranks: bytes at the peak by category, and the largest buffers then."""
        classes: list[Mapping[str, Any]] = self.data["classes"]
        return classes

    @property
    def worst(self) -> Mapping[str, Any]:
        """The class that holds most."""
        return max(self.classes, key=lambda each: each["peak"])

    @property
    def peak(self) -> int:
        """The bytes that a rank of this class holds at its worst moment."""
        return int(self.worst["peak"])

    @property
    def fits(self) -> bool | None:
        """Whether this fits the limit; None if none was given."""
        return self.data["fit"]["fits"] if "fit" in self.data else None

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks."""
        return [dict(each) for each in self.classes]

    def page(self) -> str:
        """What a rank of each stage holds over the step, with the limit as a line."""
        room = self.data["fit"]["room"] if "fit" in self.data else None
        return memory_page(self.builder, self.drawing, room)

    def print(self, stream: TextIO) -> None:
        from stagec.driver.output.analysis_table import print_footprint

        print_footprint(dict(self.data), stream)


@dataclass(frozen=True)
class PodsMemory(Report):
    """The footprints of several pods."""

    model: str
    pods: Mapping[str, MemoryPlan]

    @property
    def fits(self) -> bool | None:
        """Whether the ranks of all pods fit the limit; None if none was given."""
        each = [pod.fits for pod in self.pods.values()]
        return None if None in each else all(each)

    def as_json(self) -> dict[str, Any]:
        pods = {name: plan.as_json() for name, plan in self.pods.items()}
        return {"schema": 1, "model": self.model, "pods": pods}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks of each pod."""
        return [{"pod": pod, **row} for pod, plan in self.pods.items() for row in plan.rows()]

    def print(self, stream: TextIO) -> None:
        for plan in self.pods.values():
            stream.write(f"{plan.data['model']}\n")
            plan.print(stream)


def memory(
    options: JobOptions, *, fit: str | None = None, limit: Limit | None = None
) -> MemoryPlan | PodsMemory:
    """Plan the memory of a step. With `fit` (`best-fit`, `caching`) all buffers are placed; with a
    limit it is said whether a rank of each class fits. Raises `DiagnosticError`."""
    from stagec.analysis.footprint import footprint

    if not has_pods(options):
        builder = JobBuilder(options)
        found = footprint(builder.lower(PLAN), builder.model_name, fit)
        return MemoryPlan(_judged(found, limit), builder)

    def plan(pod: str) -> Planned[dict[str, Any]]:
        name = f"{model_name(options_of(pod, options))} ({pod})"
        return Planned(lambda module: footprint(module, name, fit))

    plans = {pod: plan(pod) for pod in pod_names(options)}
    pods = lower_pods(options, {pod: [each] for pod, each in plans.items()})
    each = {pod: _judged(plan.needed("memory"), limit) for pod, plan in plans.items()}
    plans_of = {pod: MemoryPlan(found, pods.builders[pod]) for pod, found in each.items()}
    return PodsMemory(pods.name, plans_of)


def _judged(found: dict[str, Any], limit: Limit | None) -> dict[str, Any]:
    """A footprint that says whether it fits the limit."""
    if limit is None:
        return found
    for remark in limit.remarks(found["mesh"]):
        report(remark)
    worst = max(found["classes"], key=lambda each: each["peak"])
    fit = MemoryFit(worst["peak"], limit.room(found["mesh"]))
    return {**found, "fit": {"class": worst["name"], **fit.as_json()}}
