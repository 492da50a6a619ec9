"""The files of `stagec memory`: the page of one or several jobs, and a snapshot for memory_viz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from stagec.jobs.builder import JobBuilder
from stagec.jobs.pods import Pods
from stagec.jobs.request.command_line import question_command, step_command
from stagec.jobs.request.limit import Limit, limit_option
from stagec.jobs.request.machine import DEVICE, H100, rate_options, rated_machine, roofline_of
from stagec.jobs.request.option import AnyText, CommandOption, Kind, Whole
from stagec.jobs.request.options import JobOptions
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
    """The flags of `--compare` as text, and the options that they set explicitly."""

    text: str
    options: JobOptions

    def applied_to(self, options: JobOptions) -> JobOptions:
        """A job with these changes; its other sizes stay."""
        names = self.options.explicit - {"sizes"}
        return replace(
            options,
            **{name: getattr(self.options, name) for name in names},
            sizes={**options.sizes, **self.options.sizes},
            explicit=options.explicit | self.options.explicit,
        )


class PodStage(NamedTuple):
    """A stage of a pod, or of any pod if its name is empty."""

    pod: str
    number: int

    def __str__(self) -> str:
        return f"{self.pod}/{self.number}".lstrip("/")

    def is_of(self, pod: str) -> bool:
        """Whether it refers to this pod."""
        return self.pod in ("", pod)


class StageType(Kind[PodStage]):
    """`1`, or `encoder/1`."""

    name = "[POD/]N"

    def read(self, text: str) -> PodStage:
        """The stage."""
        pod, _, number = text.rpartition("/")
        return PodStage(pod, Whole(least=0).read(number))

    def text(self, value: PodStage) -> str:
        return str(value)


#: The options of `draw`.
PICTURES = (
    CommandOption("html", PAGE_OR_PLOT, "Write a picture of the step over time."),
    CommandOption(
        "compare",
        AnyText(),
        "With --html: draw the same job with these flags too, such as '--zero 3'. May be given "
        "several times.",
        metavar="FLAGS",
        multiple=True,
    ),
    CommandOption("snapshot", RESULT, "Write a snapshot for PyTorch's memory_viz."),
    CommandOption(
        "stage",
        StageType(),
        "The stage of the snapshot, and the first one in the picture (default: the worst); with "
        "several pods such as encoder/0.",
    ),
    *rate_options(f"times of --html (default: {H100[0]} and {H100[1]}, an H100)"),
)

#: The options that the command of a page repeats.
_REPEATED = tuple(o for o in PICTURES if o.name in ("stage", "peak_tflops", "memory_gbps"))
LIMIT = limit_option(
    "Say whether the job fits a size or a device such as h100; exit with 1 if it does not."
)


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A planned job on the page: the options of its command line, its pods, and the flags of
    `--compare` that changed it."""

    options: JobOptions
    pods: Pods
    changes: str = ""

    @classmethod
    def of(cls, options: JobOptions, builders: Mapping[str, JobBuilder], changes: str = "") -> Self:
        """The job of these builders; a single builder has completed its options."""
        pods = Pods(builders)
        return cls(options if pods.several else pods.first.options, pods, changes)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The options of a page of memory: the stage to show first (default: the one with the highest
    peak), the rates for times (default: an H100), other jobs to compare, and these options by
    name."""

    stage: PodStage | None = None
    rates: Machine | None = None
    others: Sequence[DrawnJob] = ()
    given: Mapping[str, Any] = field(default_factory=lambda: {o.name: o.usual for o in _REPEATED})


def draw(
    builders: Mapping[str, JobBuilder],
    footprints: Mapping[str, Mapping[str, Any]],
    options: JobOptions,
    given: Mapping[str, Any],
    session: Session,
) -> Drawing:
    """The options of the page of a planned job, given the footprints of its pods. Also writes the
    snapshot, of the fitting stage with the highest peak, if requested. Raises
    `DiagnosticError`."""
    if given["compare"] and given["html"] is None:
        raise error("--compare needs --html", remedy="add --html FILE")
    peaks = {
        PodStage(p, c["stage"]): c["peak"] for p in footprints for c in footprints[p]["classes"]
    }
    asked: PodStage | None = given["stage"]
    fitting = [
        s for s in peaks if asked is None or (asked.is_of(s.pod) and s.number == asked.number)
    ]
    if not fitting:
        lasts = ((f"{p}/0" if p else "0", len(f["classes"]) - 1) for p, f in footprints.items())
        stages = ", ".join(f"{first} to {last}" if last else first for first, last in lasts)
        raise error(f"--stage {asked}: the job has no such stage", remedy=f"choose {stages}")
    worst = max(fitting, key=peaks.__getitem__)
    others = [_planned(changes, options, session) for changes in given["compare"]]
    if given["snapshot"] is not None:
        from stagec.analysis.footprint import timelines
        from stagec.answers.memory.torch_snapshot import snapshot

        module = builders[worst.pod].module
        timeline = next(t for stage, _, t in timelines(module) if stage == worst.number)
        write_file(given["snapshot"], snapshot(timeline))
    return Drawing(asked, rated_machine(given), others, {o.name: given[o.name] for o in _REPEATED})


def _planned(changes: Changes, options: JobOptions, session: Session) -> DrawnJob:
    """A job to compare, up to its memory plan. Raises `DiagnosticError`."""
    try:
        changed = changes.applied_to(options)
        return DrawnJob.of(
            changed, Pods.of(changed, session).lower(until=PLAN).builders, changes.text
        )
    except (DiagnosticError, NotAnIntegerError):
        session.remark(f"the next message comes from the job of --compare '{changes.text}'")
        raise


def memory_page(job: DrawnJob, drawing: Drawing, limit: Limit | None) -> str:
    """The page of a planned job."""
    from stagec.analysis.picture import pictures
    from stagec.answers.memory.memory_page import JobPictures, columns_for, page

    rates = drawing.rates or roofline_of(*H100)
    jobs = [job, *drawing.others]
    modules = (module for each in jobs for module in each.pods.modules.values())
    classes = sum(len(stages_of(func)) or 1 for module in modules for func in module.functions)
    most, stage = columns_for(classes), drawing.stage
    drawn: list[JobPictures] = []
    for each in jobs:
        given = {LIMIT.name: limit, **drawing.given}
        command = question_command("memory", each.options, None, (LIMIT, *_REPEATED), given)
        time = "" if each.changes else _time_command(each.options, drawing, limit)
        for pod, module in each.pods.modules.items():
            stages = pictures(module, rates, most)
            worst = max(stages, key=lambda picture: picture.peak).stage
            chosen = stage is not None and stage.is_of(pod) and stage.number < len(stages)
            shown = stage.number if stage is not None and chosen else worst
            title = each.pods.titles[pod] + (f" with {each.changes}" if each.changes else "")
            before = f"{pod}/" if each.pods.several else ""
            room = None if limit is None else limit.room(module.axis_sizes)
            drawn.append(JobPictures(title, command, time, shown, stages, before, room))
            time = ""
    models = dict.fromkeys(b.model_name for each in jobs for b in each.pods.builders.values())
    return page(f"Memory of {', '.join(models)}", drawn, rates)


def _time_command(options: JobOptions, drawing: Drawing, limit: Limit | None) -> str:
    """The command that draws the step over its time, on the device of the limit, or else on the
    default device; empty if rates are given."""
    if drawing.rates is not None:
        return ""
    from stagec.machines import load_machine

    device = limit.device if limit is not None else None
    return f"{step_command(options, device or load_machine(DEVICE))} --html time.html"
