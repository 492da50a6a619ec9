"""The peak memory of every class of ranks, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from stagec.analysis.memory_fit import MemoryFit
from stagec.answers.memory.picture import Drawing, DrawnJob, memory_page
from stagec.jobs.builder import JobBuilder
from stagec.jobs.idle_flags import unscheduled
from stagec.jobs.pods import Pods
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.option import OneOf
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.output.report import Report
from stagec.pipeline.instrument import PLAN
from stagec.support.rebuilt import Rebuilt

#: The allocators that can place buffers.
FIT = OneOf(("best-fit", "caching"))


@dataclass(frozen=True)
class MemoryPlan(Report):
    """The footprint of a job: the object of `stagec memory --json`. `planned` gives the builder of
    the planned module, which a process that unpickles the answer compiles again; `limit` is the
    given limit, and `drawing` has the options of its page."""

    data: Mapping[str, Any]
    planned: Rebuilt[JobBuilder] = field(repr=False, compare=False)
    limit: Limit | None = field(default=None, repr=False, compare=False)
    drawing: Drawing = field(default=Drawing(), repr=False, compare=False)

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        """The classes of ranks: bytes at the peak by category, and the largest buffers at it."""
        classes: list[Mapping[str, Any]] = self.data["classes"]
        return classes

    @property
    def worst(self) -> Mapping[str, Any]:
        """The class with the highest peak."""
        return max(self.classes, key=lambda each: each["peak"])

    @property
    def peak(self) -> int:
        """The peak of this class, in bytes per rank."""
        return int(self.worst["peak"])

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the limit; None without a limit."""
        return self.data["fit"]["fits"] if "fit" in self.data else None

    @property
    def room(self) -> int | None:
        """The limit in bytes; None without one."""
        return self.data["fit"]["room"] if "fit" in self.data else None

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks."""
        return [dict(each) for each in self.classes]

    def page(self) -> str:
        """The memory of a rank of each stage over the step, with the limit as a line."""
        builder = self.planned()
        job = DrawnJob.of(builder.options, {"": builder})
        return memory_page(job, self.drawing, self.limit, self.room)

    def print(self, stream: TextIO) -> None:
        from stagec.output.analysis_table import print_footprint

        print_footprint(dict(self.data), stream)


@dataclass(frozen=True)
class PodsMemory(Report):
    """The footprints of several pods."""

    model: str
    pods: Mapping[str, MemoryPlan]
    options: JobOptions = field(repr=False, compare=False)
    drawing: Drawing = field(default=Drawing(), repr=False, compare=False)

    @property
    def fits(self) -> bool | None:
        """Whether the ranks of all pods fit the limit; None without a limit."""
        each = [pod.fits for pod in self.pods.values()]
        return None if None in each else all(each)

    def as_json(self) -> dict[str, Any]:
        pods = {name: plan.as_json() for name, plan in self.pods.items()}
        return {"schema": 1, "model": self.model, "pods": pods}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks of each pod."""
        return [{"pod": pod, **row} for pod, plan in self.pods.items() for row in plan.rows()]

    def page(self) -> str:
        """The memory of a rank of each stage and pod over the step, with the limit as a line."""
        builders = {pod: plan.planned() for pod, plan in self.pods.items()}
        most = max(self.pods.values(), key=lambda plan: plan.peak)
        job = DrawnJob.of(self.options, builders)
        return memory_page(job, self.drawing, most.limit, most.room)

    def print(self, stream: TextIO) -> None:
        for plan in self.pods.values():
            plan.print(stream)


def memory(
    options: JobOptions, session: Session, *, fit: str | None = None, limit: Limit | None = None
) -> MemoryPlan | PodsMemory:
    """Plan the memory of a step, for each pod. With `fit` (`best-fit`, `caching`) all buffers are
    placed by that allocator; with a limit, the answer has whether ranks fit. Raises
    `DiagnosticError`."""
    from stagec.analysis.footprint import footprint

    session.report(*unscheduled(options))
    pods = Pods.of(options, session)
    pods.lower(until=PLAN)
    plans: dict[str, MemoryPlan] = {}
    with session.once() as aside:
        for pod, builder in pods.builders.items():
            plan = footprint(builder.module, pods.titles[pod], fit)
            plan["stack"] = builder.options.stack
            planned = Rebuilt(partial(_planned, options, pod), builder)
            plans[pod] = MemoryPlan(_with_fit(plan, limit, aside), planned, limit)
    return PodsMemory(pods.name, plans, options) if pods.several else next(iter(plans.values()))


def _planned(options: JobOptions, pod: str) -> JobBuilder:
    """The builder of a pod, up to its memory plan; diagnostics are dropped, since they were
    reported before. Raises `DiagnosticError`."""
    return Pods.of(options, Session()).lower(until=PLAN).builders[pod]


def _with_fit(footprint: dict[str, Any], limit: Limit | None, session: Session) -> dict[str, Any]:
    """A footprint with its entry `fit`, if there is a limit."""
    if limit is None:
        return footprint
    session.report(*limit.remarks(footprint["mesh"]))
    worst = max(footprint["classes"], key=lambda each: each["peak"])
    fit = MemoryFit(worst["peak"], limit.room(footprint["mesh"]))
    return {**footprint, "fit": {"class": worst["name"], **fit.as_json()}}
