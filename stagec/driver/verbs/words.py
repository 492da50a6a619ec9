"""Arguments of Python calls as the words of a command line, which its options read: so that a call
and a command mean the same by construction."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click

from stagec.driver.output.common import kept_reports, sources
from stagec.driver.request.options import JobOptions, job_options, take_options
from stagec.support.diagnostics import Diagnostic, DiagnosticError, NotAnIntegerError, error, render
from stagec.support.suggest import did_you_mean

_LOG = logging.getLogger("stagec")
#: What prints instead of answering.
_SHOWN = ("print_strategy", "print_after", "print_space", "time_passes", "as_json", "as_csv")


@click.command("job", add_help_option=False)
@job_options
def _job(**given: Any) -> JobOptions:
    return take_options(given)


def job_of(model: str, strategy: str | Path | None, flags: Mapping[str, Any]) -> JobOptions:
    """The options of a job. Raises `DiagnosticError` for what the command line refuses."""
    return cast(JobOptions, read(_job, (model, *([str(strategy)] if strategy else [])), flags))


def read(
    command: click.Command,
    arguments: Sequence[str],
    flags: Mapping[str, Any],
    then: Callable[[click.Context], Any] | None = None,
) -> Any:
    """What a command makes of these arguments and flags, which are named as its options are, with
    underscores for dashes; a flag that is None is not given. With `then`, what that makes of them.
    Raises `DiagnosticError`."""
    options = {str(p.name): p for p in command.params if isinstance(p, click.Option)}
    texts = list[str]()
    for name, value in flags.items():
        if name not in options or name in _SHOWN:
            known = [n for n in options if n not in _SHOWN]
            usual = "flags are those of the command line, with underscores for dashes"
            raise error(f"no flag '{name}'", remedy=did_you_mean(name, known) or usual)
        if value is not None:
            texts += _words(options[name], value)
    # behind the flags, as a model may be a file whose name begins with a dash
    words = [*texts, *(["--", *arguments] if arguments else [])]
    try:
        with command.make_context(command.name, words) as context:
            return then(context) if then is not None else command.invoke(context)
    except click.UsageError as problem:
        raise error(problem.format_message(), remedy="give it as the command line has it") from None


def _words(option: click.Option, value: Any) -> list[str]:
    """The words that give an option a value."""
    name = option.opts[0]
    if option.is_flag:
        off = option.secondary_opts[:1]
        return [name] if value else off
    if option.multiple and not isinstance(value, str | Path | Mapping):
        return [word for each in value for word in (name, _text(each))]
    return [name, _text(value)]


def _text(value: Any) -> str:
    """A value as the command line writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return ",".join(n if v is None else f"{n}={_text(v)}" for n, v in items)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_text, value))
    return str(value)


@contextmanager
def asked(depth: int = 4) -> Generator[None]:
    """Let what is reported meanwhile be warnings of Python, `depth` calls above, and what does not
    come out even, or cannot be read, a `DiagnosticError`. Such an error has notes as a command
    prints it, with the line and the remedy. Remarks, which commands print, go to the logger
    `stagec` as information."""
    told: list[Diagnostic] = []
    try:
        with kept_reports() as told, sources() as texts:
            try:
                yield
            except DiagnosticError as problem:
                for diagnostic in problem.diagnostics:
                    problem.add_note(render(diagnostic, texts))
                raise
    except NotAnIntegerError as problem:
        raise error(str(problem), remedy="choose sizes that divide") from None
    except OSError as problem:
        raise error(f"{problem.filename}: {problem.strerror}", remedy="check the path") from None
    finally:
        for diagnostic in dict.fromkeys(told):
            if diagnostic.severity == "warning":
                warnings.warn(diagnostic.message, stacklevel=depth)
            else:
                _LOG.info(diagnostic.message)
