"""Click options of commands, from their records."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.shell import completion
from stagec.driver.shell.sections import RareOption
from stagec.driver.shell.session import the_session
from stagec.jobs.request.job_file import is_job_file, printed, with_job_file
from stagec.jobs.request.machine import machine_of
from stagec.jobs.request.option import (
    AnyText,
    CommandOption,
    File,
    Kind,
    Number,
    OneOf,
    Switch,
    Whole,
)
from stagec.jobs.request.options import JOB, JobOptions, with_step
from stagec.jobs.request.result import ResultFile, form_of
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stagec.machines import Machine

F = TypeVar("F", bound=Callable[..., Any])
_T = TypeVar("_T")


def takes(*options: CommandOption) -> Callable[[F], F]:
    """Add these options to a command, in this order in its help."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = click_option(option)(function)
        return function

    return decorate


def takes_job(function: F) -> F:
    """Add a model, a strategy and the options of a job to a command."""
    function = takes(*JOB)(function)
    function = click.argument("strategy", required=False)(function)
    return takes_model(function)


def takes_model(function: F) -> F:
    """Add a model to a command."""
    complete = completion.COMPLETERS["models"]
    return click.argument("model", required=False, default="", shell_complete=complete)(function)


def click_option(option: CommandOption) -> Callable[[F], F]:
    """The click option of a record."""
    words, negation = list(option.words), ""
    about: dict[str, Any] = {"help": option.help, "default": option.default}
    about["cls"] = RareOption if option.rare else click.Option
    if isinstance(option.kind, Switch):
        if option.default is not False:
            negation = f"/--no-{words[0][2:]}"
        return click.option(words[0] + negation, option.name, is_flag=True, **about)
    if option.multiple:
        about["multiple"] = True
        del about["default"]
        if (merge := option.merge) is not None:
            about["callback"] = _merged(merge)
    if option.alone:
        about |= {"is_flag": False, "flag_value": option.alone}
    about["metavar"] = option.metavar or (
        option.kind.name if isinstance(option.kind, Whole) else None
    )
    return click.option(*words, option.name, type=type_of(option.kind), **about)


def _merged(merge: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """The callback of an option whose values are merged."""
    return lambda context, parameter, values: merge(values)


def type_of(kind: Kind[Any]) -> click.ParamType[Any]:
    """The click type of values of a kind."""
    match kind:
        case Whole():
            return _IntRange(kind)
        case Number(least=least, most=most, above=above):
            return _FloatRange(least, most, min_open=above)
        case OneOf():
            return _Choice(kind)
        case File():
            return click.Path(path_type=Path)
        case AnyText(completes=""):
            return click.STRING
        case _:
            return _OfKind(kind)


def _read(kind: Kind[_T], type_: click.ParamType[Any], value: Any, *where: Any) -> _T:
    """A text as a value of a kind, whose message is that of the type; other values are returned
    unchanged."""
    try:
        return kind.read(value) if isinstance(value, str) else value
    except ValueError as problem:
        type_.fail(str(problem), *where)


class _Choice(click.Choice[str]):
    """Choices that accept underscores for hyphens (`OneOf`)."""

    def __init__(self, kind: OneOf) -> None:
        super().__init__(kind.choices)
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return _read(self._kind, self, value, param, ctx)


class _IntRange(click.IntRange):
    """A range whose messages name an integer."""

    name = "integer"

    def __init__(self, kind: Whole) -> None:
        super().__init__(kind.least, kind.most)
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return _read(self._kind, self, value, param, ctx)


class _FloatRange(click.FloatRange):
    """A range whose messages name a float."""

    name = "float"


class _OfKind(click.ParamType[Any]):
    """The values of a kind of option."""

    def __init__(self, kind: Kind[Any]) -> None:
        self.name, self._kind = kind.name, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value of a text; other objects, such as defaults, are returned unchanged."""
        if not isinstance(value, str):
            return value
        try:
            read = self._kind.read(value)
        except ValueError as problem:
            self.fail(str(problem), param, ctx)
        if isinstance(self._kind, ResultFile) and param and ctx:
            _check_written_once(read, param.opts[-1], ctx.meta.setdefault(__name__, {}))
        return read

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The completions of the kind."""
        complete = completion.COMPLETERS.get(self._kind.completes)
        return complete(ctx, param, incomplete) if complete is not None else []


def _check_written_once(path: Path, option: str, files: dict[Path, str]) -> None:
    """Record the file that an option writes. Raises `DiagnosticError` if another option writes
    it."""
    if str(path) == "-" or (path.exists() and not path.is_file()):
        return
    other = files.setdefault(path.resolve(), option)
    if other != option:
        raise error(f"{other} and {option} write the same file '{path}'", remedy="give two names")


def take_options(given: dict[str, Any]) -> JobOptions:
    """Remove the options of a job from `given` and return them, with the values of a preset or a
    job file and the names of explicit ones. Flags override a job file, whose machine is used by
    commands with `--machine`. With `--print-job` the job is printed and the command exits. Raises
    `DiagnosticError` for a missing preset or file, and for conflicting formats of the answer."""
    form_of(given)
    context = click.get_current_context()
    written = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    names = {f.name for f in fields(JobOptions)}
    explicit = frozenset(n for n in given if context.get_parameter_source(n) in written)
    taken = {name: given.pop(name) for name in names if name in given}
    options = JobOptions(**taken, explicit=explicit & names)
    prints = given.pop("print_job")
    if is_job_file(options.model):
        options = with_job_file(options, given, the_session())
    if prints:
        click.echo(printed(options, given), nl=False)
        context.exit()
    return with_step(options)


@click.command("job", add_help_option=False)
@takes_job
def _job(**given: Any) -> JobOptions:
    return take_options(given)


def options_of_compare(text: str) -> JobOptions:
    """The options of a job in a value of `--compare`, a command line. Raises
    `DiagnosticError`."""
    try:
        with _job.make_context("job", shlex.split(text)) as context:
            options: JobOptions = _job.invoke(context)
            return options
    except ValueError as problem:
        reason = str(problem)
    except click.UsageError as problem:
        reason = problem.format_message()
    raise error(f"--compare '{text}': {reason}", remedy="write flags, as in '--zero 3 --sp'")


def take_machine(given: Mapping[str, Any]) -> Machine | None:
    """The machine of `--machine`, with `--used-ranks`. Raises `DiagnosticError`."""
    name: str | None = given["machine"]
    return None if name is None else machine_of(name, the_session(), given["used_ranks"])
