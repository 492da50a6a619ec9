"""The files of `stagec memory`: the page of one or several jobs, and a snapshot for memory_viz."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.job.builder import JobBuilder
from stagec.driver.output.common import report
from stagec.driver.request.command_line import job_words
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


@dataclass(frozen=True, slots=True)
class Drawing:
    """How memory is drawn: the stage that is shown first (the worst), rates for times (those of an
    H100), and below it other planned jobs, by the flags that make them."""

    stage: int | None = None
    rates: Machine | None = None
    others: Mapping[str, JobBuilder] = field(default_factory=dict[str, JobBuilder])


def draw(
    builder: JobBuilder, options: JobOptions, result: Mapping[str, Any], given: Mapping[str, Any]
) -> Drawing:
    """How the page of a planned job, whose footprint is known, is drawn; the snapshot is written if
    it is asked for. Raises `DiagnosticError`."""
    if given["compare"] and given["html"] is None:
        raise click.UsageError("--compare needs a page: --html FILE")
    rates = rated_machine(given)
    peaks = {c["stage"]: c["peak"] for c in result["classes"]}
    stage = given["stage"] if given["stage"] is not None else max(peaks, key=lambda s: peaks[s])
    if stage not in peaks:
        raise click.UsageError(f"--stage {stage}: the stages are 0 to {max(peaks)}")
    others = {c.text: _planned(c, options) for c in given["compare"]}
    if given["snapshot"] is not None:
        from stagec.analysis.footprint import timelines
        from stagec.driver.memory.files import snapshot

        timeline = next(t for s, _, t in timelines(builder.module) if s == stage)
        write_file(given["snapshot"], snapshot(timeline))
    return Drawing(given["stage"], rates, others)


def _planned(changes: Changes, options: JobOptions) -> JobBuilder:
    """Another job, up to its memory plan. Raises `DiagnosticError`."""
    try:
        builder = JobBuilder(changes.made(options))
        builder.lower(PLAN)
    except (DiagnosticError, NotAnIntegerError):
        text = f"what follows is of the job of --compare '{changes.text}'"
        report(Diagnostic(text, severity="remark"))
        raise
    return builder


def memory_page(builder: JobBuilder, drawing: Drawing, room: int | None) -> str:
    """The page of a planned job; `room` is a limit in bytes."""
    from stagec.analysis.picture import pictures
    from stagec.driver.memory.page import Drawn, columns_for, page

    rates = drawing.rates or roofline_of(*H100)
    jobs = {"": builder, **drawing.others}
    most = columns_for(sum(_classes(builder.module) for builder in jobs.values()))
    drawn: list[Drawn] = []
    for changes, builder in jobs.items():
        found = pictures(builder.module, rates, most)
        worst = max(found, key=lambda picture: picture.peak).stage
        stage = drawing.stage
        shown = stage if stage is not None and stage < len(found) else worst
        command = shlex.join(["stagec", "memory", *job_words(builder.options)])
        title = builder.model_name + (f" with {changes}" if changes else "")
        drawn.append(Drawn(title, command, shown, found))
    models = dict.fromkeys(builder.model_name for builder in jobs.values())
    return page(f"Memory of {', '.join(models)}", drawn, rates, room)


def _classes(module: Module) -> int:
    return sum(len(stages_of(func)) or 1 for func in module.functions)
