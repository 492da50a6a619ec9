"""The options of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.request.draft import DRAFT_OPTION, DraftText
from stagec.jobs.request.flags import FLAGS, option
from stagec.jobs.request.option import (
    PLUGIN,
    AnyText,
    CommandOption,
    File,
    SizesType,
    Whole,
    path_of,
    rare_option,
    switch,
    values_of,
)
from stagec.jobs.request.serving_flags import OPTIONS
from stagec.models import Preset, presets
from stagec.support.diagnostics import error
from stagec.support.named import find

#: The stack without defaults: a program runs as its strategy states.
IDEAL = "ideal"


def merged_sizes(given: Sequence[Mapping[str, int | None]]) -> dict[str, int | None]:
    """The sizes of several --set options; later ones override earlier ones."""
    return {name: value for sizes in given for name, value in sizes.items()}


@dataclass(frozen=True)
class _Job:
    """The options of a job that are not flags of the strategy."""

    model: str
    strategy: str | None = None
    preset: str = ""
    stack: str = IDEAL
    sizes: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    mesh: Mapping[str, int | None] | None = None
    ranks: int | None = None
    serve: str | None = None
    batch: int | None = None
    prompt: int | None = None
    context: int | None = None
    chunk: int | None = None
    speculative: int | None = None
    step: str | None = None
    prefill: str | None = None
    decode: str | None = None
    keep: str = ""  # the part of the model that a pod has, with --part
    rest: str = MAIN  # the name of the part that no --part names
    draft: DraftText | None = None
    units: frozenset[str] | None = None  # types that the machine multiplies, if known
    page: int = 1
    kv_dtype: str | None = None
    sampling: str = "gather"
    pipeline: str | None = None
    print_strategy: bool = False
    print_after: tuple[str, ...] = ()
    dump_dir: Path | None = None
    time_passes: bool = False
    reproducer: Path | None = None
    check_numerics: bool = False
    plugin: tuple[Path, ...] = ()
    explicit: frozenset[str] = frozenset()

    def changed(self, **given: Any) -> JobOptions:
        """The options with these values changed. This copies the values, which takes a tenth of the
        time of the constructor: a search makes ten thousands of options."""
        if unknown := given.keys() - vars(self).keys():
            raise TypeError(f"expected names of options, found {', '.join(sorted(unknown))}")
        options = object.__new__(type(self))
        vars(options).update(vars(self) | given)
        return cast("JobOptions", options)


if TYPE_CHECKING:

    @dataclass(frozen=True, init=False)
    class JobOptions(_Job):
        """The options of a job: those of `_Job`, and one for each flag (`FLAGS`)."""

        def __init__(self, model: str, **given: Any) -> None: ...

        def __getattr__(self, flag: str) -> Any: ...

else:
    _FLAGS = [(flag.name, Any, field(default=flag.default)) for flag in FLAGS.values()]
    JobOptions = make_dataclass("JobOptions", _FLAGS, bases=(_Job,), frozen=True)
    JobOptions.__module__ = __name__  # for pickle


#: The sizes of a model's symbols.
SIZES = CommandOption(
    "sizes",
    SizesType(),
    "Sizes of symbols; B is the global batch in sequences.",
    multiple=True,
    merge=merged_sizes,
    spelling="--set",
)
STACK = CommandOption(
    "stack",
    AnyText("stacks"),
    "The software that runs the job, as defaults of a strategy: ideal, or one of 'stagec "
    "stacks', or a file.",
    IDEAL,
    metavar="NAME[@VERSION]|FILE",
)
#: The options of a job, in their order in the help.
JOB = (
    CommandOption(
        "preset",
        AnyText("presets"),
        "A published run: model, sizes, mesh and strategy ('stagec presets' lists them).",
        "",
        metavar="NAME",
    ),
    SIZES,
    STACK,
    CommandOption(
        "mesh",
        SizesType(open_names=True),
        "Mesh axes, slowest first: pp=2,dp=4,tp=8 (a name alone is left open).",
    ),
    CommandOption(
        "ranks",
        Whole(least=1),
        "Total number of ranks: sets the axis left open (--dp if no --mesh), or checks their "
        "product.",
    ),
    *OPTIONS,
    DRAFT_OPTION,
    *map(option, FLAGS.values()),
    CommandOption(
        "pipeline",
        AnyText(),
        "Passes to run (default: train; forward if no argument is a param), such as "
        "'train,+after(infer-shapes):my-pass'.",
        metavar="PASSES",
    ),
    switch("print_strategy", "Print the strategy and stop."),
    switch("print_job", "Print the job as a file, which can be given as MODEL, and stop."),
    CommandOption(
        "print_after",
        AnyText(),
        "Print the module after passes.",
        metavar="NAME|all|change",
        multiple=True,
    ),
    CommandOption("dump_dir", File(), "Write the module after every pass.", metavar="DIR"),
    switch("time_passes", "Print the time of each pass.", rare=True),
    rare_option("reproducer", File(), "Where to write a crash reproducer.", metavar="FILE"),
    switch("check_numerics", "Compare numbers before and after each pass, on tiny sizes."),
    PLUGIN,
)
#: The options that show a job and are not part of it.
SHOWN = ("print_strategy", "print_job", "print_after", "time_passes")


def request(
    options: JobOptions,
    axes: Mapping[str, int | None],
    sizes: Mapping[str, int | None],
    sequences: tuple[str, ...] = ("S",),
) -> FlagValues:
    """The values of flags, on a mesh with these axes, for a model with these sizes; `sequences` are
    its dimensions of tokens."""
    return FlagValues(vars(options), axes, sizes, sequences)


def job_options(
    model: str, strategy: str | None, flags: Mapping[str, Any], *, where: str = ""
) -> JobOptions:
    """The options of a model, with a strategy from a file or from flags by their names, and with
    the step of its preset. Raises `DiagnosticError` as the command line does, with `where` before
    the message."""
    try:
        for name in (model, strategy or ""):
            path_of(name)
    except ValueError as problem:
        raise error(f"{where}{problem}", remedy="give a name without it") from None
    values, explicit = values_of(JOB, flags, without=SHOWN, where=where)
    names = {"model"} if model else set[str]()
    names |= {"strategy"} if strategy is not None else set()
    options = JobOptions(model, strategy=strategy, **values, explicit=explicit | names)
    return with_step(options)


def find_preset(options: JobOptions) -> Preset:
    """The preset that options name. Raises `DiagnosticError`."""
    preset = find("preset", options.preset, presets())
    if options.strategy is not None:
        raise error(
            f"--preset {options.preset} and {options.strategy} cannot be used together: both give "
            "the strategy",
            remedy=f"leave one of them out; 'stagec presets {options.preset}' prints the text of "
            "the preset",
        )
    return preset


def with_step(options: JobOptions) -> JobOptions:
    """The options with the step of serving of their preset, as if it had been given. Given options
    take precedence. Raises `DiagnosticError`."""
    if not options.preset:
        return options
    preset = find_preset(options)
    step = {n: v for n, v in preset.step.items() if n not in options.explicit}
    return options.changed(**step, explicit=options.explicit | step.keys())
