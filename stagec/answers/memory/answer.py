"""The peak memory of every class of ranks, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """The footprint of a job, with several pods that of each: the object of `stagec memory --json`.
    `planned` gives the builder of the planned module of each pod, which a process that unpickles
    the answer compiles again; `limit` is the given limit, and `drawing` has the options of its
    page."""

    data: Mapping[str, Any]
    options: JobOptions = field(repr=False, compare=False)
    planned: Mapping[str, Rebuilt[JobBuilder]] = field(repr=False, compare=False)
    limit: Limit | None = field(default=None, repr=False, compare=False)
    drawing: Drawing = field(default=Drawing(), repr=False, compare=False)

    @property
    def pods(self) -> Mapping[str, MemoryPlan]:
        """The plan of each of several pods, or this one, whose pod has an empty name."""
        return {
            pod: replace(self, data=data, planned={"": self.planned[pod]})
            for pod, data in self._each.items()
        }

    @property
    def _each(self) -> Mapping[str, Mapping[str, Any]]:
        each: Mapping[str, Mapping[str, Any]] = self.data.get("pods", {"": self.data})
        return each

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        """The classes of ranks: bytes at the peak by category, and the largest buffers at it."""
        return [each for data in self._each.values() for each in data["classes"]]

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
        """Whether the ranks of all pods fit the limit; None without a limit."""
        each = [data["fit"]["fits"] for data in self._each.values() if "fit" in data]
        return all(each) if each else None

    @property
    def room(self) -> int | None:
        """The limit of the class with the highest peak in bytes; None without one."""
        data = next(data for data in self._each.values() if self.worst in data["classes"])
        return data["fit"]["room"] if "fit" in data else None

    @property
    def advice(self) -> Mapping[str, Any] | None:
        """Changes with which a job fits, if they were asked for and it does not."""
        return self.data.get("advice")

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks of each pod."""
        return [
            {**({"pod": pod} if pod else {}), **each}
            for pod, data in self._each.items()
            for each in data["classes"]
        ]

    def page(self) -> str:
        """The memory of a rank of each stage and pod over the step, with the limit as a line."""
        builders = {pod: planned() for pod, planned in self.planned.items()}
        job = DrawnJob.of(self.options, builders)
        return memory_page(job, self.drawing, self.limit)

    def print(self, stream: TextIO) -> None:
        from stagec.output.analysis_table import print_footprint

        for data in self._each.values():
            print_footprint(dict(data), stream)


def memory(
    options: JobOptions, session: Session, *, fit: str | None = None, limit: Limit | None = None
) -> MemoryPlan:
    """Plan the memory of a step, for each pod. With `fit` (`best-fit`, `caching`) all buffers are
    placed by that allocator; with a limit, the answer has whether ranks fit. Raises
    `DiagnosticError`."""
    from stagec.analysis.footprint import footprint

    session.report(*unscheduled(options))
    pods = Pods.of(options, session)
    pods.lower(until=PLAN)
    plans: dict[str, dict[str, Any]] = {}
    with session.once() as aside:
        for pod, builder in pods.builders.items():
            plan = footprint(builder.module, pods.titles[pod], fit)
            plan["stack"] = builder.options.stack
            plans[pod] = _with_fit(plan, limit, aside)
    named = {pod if pods.several else "": pod for pod in plans}
    planned = {
        n: Rebuilt(partial(_planned, options, p), pods.builders[p]) for n, p in named.items()
    }
    several = {"schema": 1, "model": pods.name, "pods": plans}
    return MemoryPlan(several if pods.several else plans[named[""]], options, planned, limit)


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
