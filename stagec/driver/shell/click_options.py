"""Click options from their records, for commands of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.driver.shell import completion
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
from stagec.jobs.request.result import ResultFile
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])
_T = TypeVar("_T")


class RareOption(click.Option):
    """An option that only `--help-all` shows."""


def takes(*options: CommandOption) -> Callable[[F], F]:
    """Add these options to a command, in this order in its help."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = click_option(option)(function)
        return function

    return decorate


def click_option(option: CommandOption) -> Callable[[F], F]:
    """The click option of a record."""
    words, negation = list(option.words), ""
    about: dict[str, Any] = {"help": option.help, "default": option.default}
    about["cls"] = RareOption if option.rare else click.Option
    if isinstance(option.kind, Switch) and not option.alone:
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
