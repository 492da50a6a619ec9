"""`stagec passes`: lists passes and pipelines, or describes one."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.show import LISTING, show_list
from stagec.jobs.request.option import PLUGIN
from stagec.output.report import Report
from stagec.pipeline.passes import Pass, option_text, options_of
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

_T = TypeVar("_T")
_HINT = "'stagec passes NAME' describes one, with its options and an example."


@click.command("passes")
@click.argument("name", required=False, shell_complete=completion.COMPLETERS["passes"])
@click.option("--help-pass", hidden=True, help="The same as NAME, for older scripts.")
@takes(*LISTING, PLUGIN)
def command(
    name: str | None, help_pass: str | None, plugin: tuple[Path, ...], **given: Any
) -> None:
    """List the passes and the named pipelines, or describe the one called NAME."""
    loaded, name = load_plugins(plugin), name or help_pass
    known = {**loaded.passes, **loaded.pipelines}
    if name is not None and name not in known:
        raise error(
            f"unknown pass '{name}'",
            remedy=did_you_mean(name, known) or "'stagec passes' lists the passes",
        )
    show_list(_Passes(loaded, name), given, _HINT if name is None else "")


@dataclass(frozen=True)
class _Passes(Report):
    """The passes and the pipelines, or one of them."""

    loaded: Loaded
    name: str | None

    def as_json(self) -> dict[str, Any]:
        passes = {name: _data(each) for name, each in self._chosen(self.loaded.passes)}
        for name, data in passes.items():
            data["plugin"] = self.loaded.origins[name]
        return {"passes": passes, "pipelines": dict(self._chosen(self.loaded.pipelines))}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each pass."""
        passes = self._chosen(self.loaded.passes)
        return [
            {"name": name, "phases": phases_text(each), "summary": summary(each)}
            for name, each in passes
        ]

    def print(self, stream: TextIO) -> None:
        if self.name is not None:
            stream.write(_description(self.loaded, self.name))
            return
        from stagec.output.tables import console, table

        rows = (row.values() for row in self.rows())
        heads = "name", "may run in -> gives", "what it does"
        passes = table("Passes", *heads, rows=rows, text_columns=3)
        passes.columns[1].no_wrap = True
        named = self.loaded.pipelines.items()
        pipelines = table("Pipelines", "name", "passes", rows=named, text_columns=2)
        out = console(stream, 160)
        out.print(passes)
        out.print(pipelines)

    def _chosen(self, known: Mapping[str, _T]) -> Iterator[tuple[str, _T]]:
        return ((name, each) for name, each in known.items() if self.name in (None, name))


def phases_text(pass_type: type[Pass]) -> str:
    """`shaped to sharded -> partitioned`: the phases in which a pass may run, and its result."""
    until = pass_type.until or pass_type.needs
    needs = pass_type.needs.label + (f" to {until.label}" if until is not pass_type.needs else "")
    return needs + (f" -> {pass_type.gives.label}" if pass_type.gives else "")


def summary(pass_type: type[Pass]) -> str:
    """The first paragraph of the documentation, in one line."""
    return (inspect.getdoc(pass_type) or "").partition("\n\n")[0].replace("\n", " ")


def _description(loaded: Loaded, name: str) -> str:
    if name in loaded.pipelines:
        text, passes = loaded.pipelines[name], str(loaded.pipeline(name))
        shown = f"{name}: a pipeline\n\n    {text}\n"
        return shown + (f"\nIts passes:\n\n    {passes}\n" if passes != text else "")
    pass_type = loaded.passes[name]
    lines = [f"{name}: {phases_text(pass_type)}", "", inspect.getdoc(pass_type) or ""]
    options = options_of(pass_type)
    if options:
        lines += ["", "Options:"]
    for option in options.values():
        default = "required" if option.required else f"default {option_text(option.default)}"
        lines.append(f"  {option.name}: {option.kind} ({default})  {option.help}".rstrip())
    return "\n".join(lines) + "\n"


def _data(pass_type: type[Pass]) -> dict[str, Any]:
    return {
        "needs": pass_type.needs.label,
        "until": (pass_type.until or pass_type.needs).label,
        "gives": pass_type.gives.label if pass_type.gives else None,
        "summary": summary(pass_type),
        "options": {
            option.name: {
                "type": option.kind,
                "default": None if option.required else option_text(option.default),
                "help": option.help,
            }
            for option in options_of(pass_type).values()
        },
    }
