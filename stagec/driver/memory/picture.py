"""The files of `stagec memory`: the page of one or several jobs, and a snapshot for memory_viz."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.pods import Pods
from stagec.driver.output.common import report
from stagec.driver.request.command_line import job_words
from stagec.driver.request.limit import Limit
from stagec.driver.request.options import JobOptions, job_command
from stagec.driver.request.rates import H100, rate_options, rated_machine, roofline_of
from stagec.driver.request.result import PAGE_OR_PLOT, RESULT
from stagec.ir.module import Module
from stagec.pipeline.instrument import PLAN
from stagec.schedule.attached import stages_of
from stagec.support.diagnostics import Diagnostic, DiagnosticError, NotAnIntegerError
from stagec.support.files import write_file

if TYPE_CHECKING:
    from stagec.machines import Machine

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Changes:
    """Flags as they are written, and the options of which they are explicit ones."""

    text: str
    options: JobOptions

    def made(self, options: JobOptions) -> JobOptions:
        """A job with these changes; of its sizes, those that are given."""
        names = self.options.explicit - {"sizes"}
        return replace(
            options,
            **{name: getattr(self.options, name) for name in names},
            sizes={**options.sizes, **self.options.sizes},
            explicit=options.explicit | self.options.explicit,
        )


class _Flags(click.ParamType[Changes]):
    name = "FLAGS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Changes:
        try:
            with job_command.make_context("job", shlex.split(value)) as inner:
                return Changes(value, job_command.invoke(inner))
        except ValueError as e:
            self.fail(f"'{value}': {e}", param, ctx)
        except click.UsageError as e:
            self.fail(f"'{value}': {e.format_message()}", param, ctx)


def picture_options(function: F) -> F:
    """Give a command the options of `draw`."""
    for decorate in reversed(
        (
            click.option(
                "--html",
                type=PAGE_OR_PLOT,
                metavar="FILE",
                help="Write a picture of the step over time.",
            ),
            click.option(
                "--compare",
                type=_Flags(),
                multiple=True,
                help="With --html: below it the same job with these flags, such as '--zero 3'; "
                "several: one below the other.",
            ),
            click.option(
                "--snapshot",
                type=RESULT,
                metavar="FILE",
                help="Write a snapshot for PyTorch's memory_viz.",
            ),
            click.option(
                "--stage",
                type=click.IntRange(min=0),
                metavar="N",
                help="The stage of the snapshot, which the picture shows first (default: the "
                "worst).",
            ),
            rate_options(f"times of --html (default: {H100[0]} and {H100[1]}, an H100)"),
        )
    ):
        function = decorate(function)
    return function


def draw(
    builders: Mapping[str, JobBuilder],
    footprints: Mapping[str, Mapping[str, Any]],
    options: JobOptions,
    given: Mapping[str, Any],
) -> None:
    """Write the files that are asked for of a planned job, the footprints of whose pods are known:
    the page of all, and a snapshot of what holds most. Raises `DiagnosticError`."""
    if given["compare"] and given["html"] is None:
        raise click.UsageError("--compare needs a page: --html FILE")
    if given["stage"] is not None and len(builders) > 1:
        raise click.UsageError("--stage is one of a pod, and the job has several")
    rates = rated_machine(given)
    most = max(footprints, key=lambda pod: max(c["peak"] for c in footprints[pod]["classes"]))
    peaks = {c["stage"]: c["peak"] for c in footprints[most]["classes"]}
    stage = given["stage"] if given["stage"] is not None else max(peaks, key=lambda s: peaks[s])
    if stage not in peaks:
        raise click.UsageError(f"--stage {stage}: the stages are 0 to {max(peaks)}")
    if given["html"] is not None:
        jobs = [_Job.of(options, builders), *(_planned(c, options) for c in given["compare"])]
        write_file(given["html"], _page(jobs, stage, rates, footprints[most]["mesh"], given))
    if given["snapshot"] is not None:
        from stagec.analysis.footprint import timelines
        from stagec.driver.memory.files import snapshot

        timeline = next(t for s, _, t in timelines(builders[most].module) if s == stage)
        write_file(given["snapshot"], snapshot(timeline))


@dataclass(frozen=True, slots=True)
class _Job:
    """A job on the page: its command line is of `options`; what is changed, and its pods."""

    options: JobOptions
    pods: Pods
    changes: str = ""

    @classmethod
    def of(cls, options: JobOptions, builders: Mapping[str, JobBuilder], changes: str = "") -> _Job:
        """The job of these builders: of one, the options are those that it has completed."""
        pods = Pods(builders)
        return cls(options if pods.several else pods.first.options, pods, changes)


def _planned(changes: Changes, options: JobOptions) -> _Job:
    """Another job, up to its memory plan. Raises `DiagnosticError`."""
    try:
        changed = changes.made(options)
        return _Job.of(changed, Pods.of(changed).lower(until=PLAN).builders, changes.text)
    except (DiagnosticError, NotAnIntegerError):
        text = f"what follows is of the job of --compare '{changes.text}'"
        report(Diagnostic(text, severity="remark"))
        raise


def _page(
    jobs: Sequence[_Job],
    stage: int,
    rates: Machine | None,
    mesh: Mapping[str, int],
    given: Mapping[str, Any],
) -> str:
    """The page of jobs; `mesh` is that of what holds most."""
    from stagec.analysis.picture import pictures
    from stagec.driver.memory.page import Drawn, columns_for, page

    rates = rates or roofline_of(*H100)
    modules = [module for job in jobs for module in job.pods.modules.values()]
    most = columns_for(sum(map(_classes, modules)))
    drawn: list[Drawn] = []
    for job in jobs:
        command = shlex.join(["stagec", "memory", *job_words(job.options)])
        for pod, module in job.pods.modules.items():
            found = pictures(module, rates, most)
            worst = max(found, key=lambda picture: picture.peak).stage
            shown = stage if given["stage"] is not None and stage < len(found) else worst
            title = job.pods.titles[pod] + (f" with {job.changes}" if job.changes else "")
            drawn.append(Drawn(title, command, shown, found))
    models = dict.fromkeys(each.model_name for job in jobs for each in job.pods.builders.values())
    limit: Limit | None = given["limit"]
    room = None if limit is None else limit.room(mesh)
    return page(f"Memory of {', '.join(models)}", drawn, rates, room)


def _classes(module: Module) -> int:
    return sum(len(stages_of(func)) or 1 for func in module.functions)
