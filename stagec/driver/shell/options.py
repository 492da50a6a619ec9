"""The options of commands that take a job."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.sections import JobCommand
from stagec.driver.shell.session import the_session
from stagec.jobs.request.job_file import is_job_file, printed, with_job_file
from stagec.jobs.request.machine import machine_of
from stagec.jobs.request.options import JOB, JobOptions, with_step
from stagec.jobs.request.result import form_of
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.machines import Machine

F = TypeVar("F", bound=Callable[..., Any])


def takes_job(function: F) -> F:
    """Add a model, a strategy and the options of a job to a command."""
    function = takes(*JOB)(function)
    function = click.argument("strategy", required=False)(function)
    return takes_model(function)


def takes_model(function: F) -> F:
    """Add a model to a command."""
    complete = completion.COMPLETERS["models"]
    return click.argument("model", required=False, default="", shell_complete=complete)(function)


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


@click.command("job", cls=JobCommand, add_help_option=False)
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
