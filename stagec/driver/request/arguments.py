"""Values by the names of options as the words of a command line, which these options read: of
Python calls and of job files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click

from stagec.driver.request.sizes import SizesType
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

_AS_THERE = "give it as the command line has it"
#: What prints or draws instead of answering.
_SHOWN = (
    *("print_strategy", "print_job", "print_after", "print_space", "time_passes"),
    *("as_json", "as_csv", "html"),
)


def read(
    command: click.Command,
    arguments: Sequence[str],
    flags: Mapping[str, Any],
    *,
    without: Sequence[str] = (),
) -> Any:
    """What a command makes of these arguments and flags, which are named as its options are, with
    underscores for dashes; a flag that is None is not given. Those `without` are not its flags
    here. Raises `DiagnosticError`."""
    options = {
        str(p.name): p
        for p in command.params
        if isinstance(p, click.Option) and p.name not in (*_SHOWN, *without)
    }
    texts = list[str]()
    for name, value in flags.items():
        if name not in options:
            usual = "flags are those of the command line, with underscores for dashes"
            raise error(f"no flag '{name}'", remedy=did_you_mean(name, options) or usual)
        if value is not None:
            texts += _words(options[name], value)
    # behind the flags, as a model may be a file whose name begins with a dash
    words = [*texts, *(["--", *arguments] if arguments else [])]
    try:
        with command.make_context(command.name, words) as context:
            return command.invoke(context)
    except click.BadParameter as problem:
        name = problem.param.name if problem.param is not None else ""
        raise error(f"{name}: {problem.message}", remedy=_AS_THERE) from None
    except click.UsageError as problem:
        raise error(problem.format_message(), remedy=_AS_THERE) from None


def _words(option: click.Option, value: Any) -> list[str]:
    """The words that give an option a value."""
    name = option.opts[0]
    if option.is_flag:
        if value not in (True, False):
            raise error(
                f"{option.name}: expects True or False, found {value!r:.60}", remedy=_AS_THERE
            )
        return [name] if value else option.secondary_opts[:1]
    if isinstance(option.type, SizesType) and not isinstance(value, str | Mapping):
        raise error(
            f"{option.name}: expects a dictionary, found {value!r:.60}", remedy='as in {"L": 4}'
        )
    if option.multiple and not isinstance(value, str | Path | Mapping):
        return [word for each in value for word in (name, text_of(each))]
    return [name, text_of(value)]


def text_of(value: Any) -> str:
    """A value as the command line writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return ",".join(n if v is None else f"{n}={text_of(v)}" for n, v in items)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(text_of, cast("Sequence[object]", value)))
    return str(value)
