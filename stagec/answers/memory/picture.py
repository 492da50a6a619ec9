"""The files of `stagec memory`: the page of one or several jobs, and a snapshot for memory_viz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pods import Pods
from stagec.jobs.request.command_line import step_command
from stagec.jobs.request.option import AnyText, CommandOption, Whole
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.rates import H100, rate_options, rated_machine, roofline_of
from stagec.jobs.request.result import PAGE_OR_PLOT, RESULT
from stagec.jobs.session import Session
from stagec.pipeline.instrument import PLAN
from stagec.schedule.attached import stages_of
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError, error
from stagec.support.files import write_file

if TYPE_CHECKING:
    from stagec.machines import Machine


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


#: The options of `draw`.
PICTURES = (
    CommandOption("html", PAGE_OR_PLOT, "Write a picture of the step over time.", metavar="FILE"),
    CommandOption(
        "compare",
        AnyText(),
        "With --html: below it the same job with these flags, such as '--zero 3'; "
        "several: one below the other.",
        metavar="FLAGS",
        multiple=True,
    ),
    CommandOption("snapshot", RESULT, "Write a snapshot for PyTorch's memory_viz.", metavar="FILE"),
    CommandOption(
        "stage",
        Whole(least=0),
        "The stage of the snapshot, which the picture shows first (default: the worst).",
        metavar="N",
    ),
    *rate_options(f"times of --html (default: {H100[0]} and {H100[1]}, an H100)"),
)


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A planned job on the page: its command line is of `options`; what is changed, and its
    pods."""

    options: JobOptions
    pods: Pods
    changes: str = ""

    @classmethod
    def of(cls, options: JobOptions, builders: Mapping[str, JobBuilder], changes: str = "") -> Self:
        """The job of these builders: of one, the options are those that it has completed."""
        pods = Pods(builders)
        return cls(options if pods.several else pods.first.options, pods, changes)


@dataclass(frozen=True, slots=True)
class Drawing:
    """How memory is drawn: the stage that is shown first (the worst), rates for times (those of an
    H100), and below it other planned jobs."""

    stage: int | None = None
    rates: Machine | None = None
    others: Sequence[DrawnJob] = ()


def draw(
    builders: Mapping[str, JobBuilder],
    footprints: Mapping[str, Mapping[str, Any]],
    options: JobOptions,
    given: Mapping[str, Any],
    session: Session,
) -> Drawing:
    """How the page of a planned job, the footprints of whose pods are known, is drawn; a snapshot
    of what holds most is written if it is asked for. Raises `DiagnosticError`."""
    if given["compare"] and given["html"] is None:
        raise error("--compare is about a page", remedy="add --html FILE")
    if given["stage"] is not None and len(builders) > 1:
        raise error("--stage is one of a pod, and the job has several", remedy="leave it out")
    most = max(footprints, key=lambda pod: max(c["peak"] for c in footprints[pod]["classes"]))
    peaks = {c["stage"]: c["peak"] for c in footprints[most]["classes"]}
    stage = given["stage"] if given["stage"] is not None else max(peaks, key=lambda s: peaks[s])
    if stage not in peaks:
        raise error(
            f"--stage {stage}: there is no such stage", remedy=f"the stages are 0 to {max(peaks)}"
        )
    others = [_planned(changes, options, session) for changes in given["compare"]]
    if given["snapshot"] is not None:
        from stagec.analysis.footprint import timelines
        from stagec.answers.memory.files import snapshot

        timeline = next(t for s, _, t in timelines(builders[most].module) if s == stage)
        write_file(given["snapshot"], snapshot(timeline))
    return Drawing(given["stage"], rated_machine(given), others)


def _planned(changes: Changes, options: JobOptions, session: Session) -> DrawnJob:
    """Another job, up to its memory plan. Raises `DiagnosticError`."""
    try:
        changed = changes.made(options)
        return DrawnJob.of(
            changed, Pods.of(changed, session).lower(until=PLAN).builders, changes.text
        )
    except (DiagnosticError, NotAnIntegerError):
        session.remark(f"what follows is of the job of --compare '{changes.text}'")
        raise


def memory_page(job: DrawnJob, drawing: Drawing, room: int | None) -> str:
    """The page of a planned job; `room` is a limit in bytes."""
    from stagec.analysis.picture import pictures
    from stagec.answers.memory.page import Drawn, columns_for, page

    rates = drawing.rates or roofline_of(*H100)
    jobs = [job, *drawing.others]
    modules = [module for each in jobs for module in each.pods.modules.values()]
    most, stage = columns_for(sum(map(_classes, modules))), drawing.stage
    drawn: list[Drawn] = []
    for each in jobs:
        command = step_command(each.options, None)
        for pod, module in each.pods.modules.items():
            stages = pictures(module, rates, most)
            worst = max(stages, key=lambda picture: picture.peak).stage
            shown = stage if stage is not None and stage < len(stages) else worst
            title = each.pods.titles[pod] + (f" with {each.changes}" if each.changes else "")
            drawn.append(Drawn(title, command, shown, stages))
    models = dict.fromkeys(b.model_name for each in jobs for b in each.pods.builders.values())
    return page(f"Memory of {', '.join(models)}", drawn, rates, room)


def _classes(module: Module) -> int:
    return sum(len(stages_of(func)) or 1 for func in module.functions)
