"""The options that say which job to compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from stagec.driver.request import completion
from stagec.driver.request.draft import DRAFT_OPTION, DraftText
from stagec.driver.request.flags import FLAGS, option
from stagec.driver.request.preset import with_step
from stagec.driver.request.serving import OPTIONS
from stagec.driver.request.sizes import SizesType
from stagec.ir_spec.strategy.part import MAIN
from stagec.ir_spec.strategy.statement import FlagValues

F = TypeVar("F", bound=Callable[..., Any])


def merged_sizes(
    ctx: click.Context, param: click.Parameter, given: Sequence[dict[str, int | None]]
) -> dict[str, int | None]:
    """The sizes of several --set; of two for one symbol the later one counts."""
    return {name: value for sizes in given for name, value in sizes.items()}


@dataclass(frozen=True)
class _Job:
    """The options of a job that write no strategy, as click gives them."""

    model: str
    strategy: str | None = None
    preset: str = ""
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
    keep: str = ""  # the part of the model that a pod has, where --part names others
    rest: str = MAIN  # what the part is called that no --part names
    draft: DraftText | None = None
    units: frozenset[str] | None = None  # types that the machine multiplies, if that is known
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
        """The options with these values."""
        return cast("JobOptions", replace(self, **given))


if TYPE_CHECKING:

    @dataclass(frozen=True, init=False)
    class JobOptions(_Job):
        """The options of a job: those of `_Job`, and one for each flag (`FLAGS`)."""

        def __init__(self, model: str, **given: Any) -> None: ...

        def __getattr__(self, flag: str) -> Any: ...

else:
    _FLAGS = [(flag.name, Any, field(default=flag.default)) for flag in FLAGS.values()]
    JobOptions = make_dataclass("JobOptions", _FLAGS, bases=(_Job,), frozen=True)
    JobOptions.__module__ = __name__  # so that it can be sent to another process


#: The sizes of a model's symbols.
SIZES = click.option(
    "--set",
    "sizes",
    type=SizesType(),
    multiple=True,
    callback=merged_sizes,
    help="Sizes of symbols; B is the global batch in sequences.",
)
_OPTIONS = (
    click.argument("model", required=False, default="", shell_complete=completion.models),
    click.argument("strategy", required=False),
    click.option(
        "--preset",
        default="",
        metavar="NAME",
        shell_complete=completion.presets,
        help="A published run: model, sizes, mesh and strategy ('stagec presets' lists them).",
    ),
    SIZES,
    click.option(
        "--mesh",
        type=SizesType(open_names=True),
        help="Mesh axes, slowest first: pp=2,dp=4,tp=8 (a name alone is left open).",
    ),
    click.option(
        "--ranks",
        type=click.IntRange(min=1),
        metavar="N",
        help="All ranks: fills in the axis left open (--dp if no --mesh), or checks their product.",
    ),
    *OPTIONS,
    DRAFT_OPTION,
    *map(option, FLAGS.values()),
    click.option(
        "--pipeline",
        metavar="PASSES",
        help="Passes to run (default: train; forward if no argument is a param), such as "
        "'train,+after(infer-shapes):my-pass'.",
    ),
    click.option("--print-strategy", is_flag=True, help="Print the strategy and stop."),
    click.option(
        "--print-job",
        is_flag=True,
        help="Print the job as a file, which can be given as MODEL, and stop.",
    ),
    click.option(
        "--print-after",
        multiple=True,
        metavar="NAME|all|change",
        help="Print the module after passes.",
    ),
    click.option("--dump-dir", type=Path, metavar="DIR", help="Write the module after every pass."),
    click.option("--time-passes", is_flag=True, help="Print the time of each pass."),
    click.option(
        "--reproducer", type=Path, metavar="FILE", help="Where to write a crash reproducer."
    ),
    click.option(
        "--check-numerics",
        is_flag=True,
        help="Compare numbers before and after each pass, on tiny sizes.",
    ),
    click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file."),
)


def request(
    options: JobOptions,
    axes: Mapping[str, int | None],
    sizes: Mapping[str, int | None],
    sequences: tuple[str, ...] = ("S",),
) -> FlagValues:
    """What options ask for, on a mesh of these axes, of a model of these sizes whose tokens are
    along these dimensions."""
    return FlagValues(vars(options), axes, sizes, sequences)


def job_options(function: F) -> F:
    """The shared options, in this order in the help."""
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


def take_options(given: dict[str, Any]) -> JobOptions:
    """Move the shared options out of what click gave, with the names of those that were given, by
    a preset or a job file too; what is given beside a file wins, and its machine is that of a
    command that asks for one. With `--print-job` the job is printed, and the command ends. Raises
    `DiagnosticError` for a preset or a file that there is not."""
    context = click.get_current_context()
    written = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    explicit = frozenset(n for n in given if context.get_parameter_source(n) in written)
    taken = {f.name: given.pop(f.name) for f in fields(JobOptions) if f.name in given}
    prints = given.pop("print_job", False)
    options = JobOptions(**taken, explicit=explicit & {f.name for f in fields(JobOptions)})
    if options.model.endswith(".toml") or prints:
        from stagec.driver.request.job_file import printed, with_job_file

        options = with_job_file(options, given)
        if prints:
            click.echo(printed(options, given), nl=False)
            context.exit()
    return with_step(options)


@click.command("job", add_help_option=False)
@job_options
def job_command(**given: Any) -> JobOptions:
    """The options of a job alone, for texts that hold some."""
    return take_options(given)
