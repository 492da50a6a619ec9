"""`stagec passes`: lists passes and pipelines, or describes one."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import click

from stagec.driver.shell import completion
from stagec.driver.shell.show import write_output
from stagec.pipeline.passes import Pass, option_text, options_of
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean


@click.command("passes")
@click.argument("name", required=False, shell_complete=completion.COMPLETERS["passes"])
@click.option("--help-pass", hidden=True, help="The same as NAME, for older scripts.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file.")
def command(
    name: str | None, help_pass: str | None, as_json: bool, plugin: tuple[Path, ...]
) -> None:
    """List the passes and the named pipelines, or describe the one called NAME."""
    loaded = load_plugins(plugin)
    if as_json:
        write_output(json.dumps(_data(loaded), indent=2) + "\n", None)
    elif name := name or help_pass:
        write_output(_description(loaded, name), None)
    else:
        write_output(_listing(loaded), None)


def phases_text(pass_type: type[Pass]) -> str:
    """`shaped to sharded -> partitioned`: where a pass may run and where it leads."""
    until = pass_type.until or pass_type.needs
    needs = pass_type.needs.label + (f" to {until.label}" if until is not pass_type.needs else "")
    return needs + (f" -> {pass_type.gives.label}" if pass_type.gives else "")


def summary(pass_type: type[Pass]) -> str:
    """The first paragraph of the documentation, in one line."""
    return (inspect.getdoc(pass_type) or "").partition("\n\n")[0].replace("\n", " ")


def _listing(loaded: Loaded) -> str:
    width = max(map(len, loaded.passes))
    lines = ["passes (may run in -> gives):"]
    for name, pass_type in loaded.passes.items():
        lines.append(f"  {name:<{width}}  {phases_text(pass_type)}")
        lines += textwrap.wrap(
            summary(pass_type), 79, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    lines.append("pipelines:")
    lines += [f"  {name:<{width}}  {text}" for name, text in loaded.pipelines.items()]
    return "\n".join(lines) + "\n"


def _description(loaded: Loaded, name: str) -> str:
    if name in loaded.pipelines:
        text, passes = loaded.pipelines[name], str(loaded.pipeline(name))
        shown = f"{name}: a pipeline\n\n    {text}\n"
        return shown + (f"\nIts passes:\n\n    {passes}\n" if passes != text else "")
    pass_type = loaded.passes.get(name)
    if pass_type is None:
        known = {**loaded.passes, **loaded.pipelines}
        raise error(
            f"unknown pass '{name}'",
            remedy=did_you_mean(name, known) or "'stagec passes' lists the passes",
        )
    lines = [f"{name}: {phases_text(pass_type)}", "", inspect.getdoc(pass_type) or ""]
    options = options_of(pass_type)
    if options:
        lines += ["", "Options:"]
    for option in options.values():
        default = "required" if option.required else f"default {option_text(option.default)}"
        lines.append(f"  {option.name}: {option.kind} ({default})  {option.help}".rstrip())
    return "\n".join(lines) + "\n"


def _data(loaded: Loaded) -> dict[str, object]:
    passes = {
        name: {
            "needs": pass_type.needs.label,
            "until": (pass_type.until or pass_type.needs).label,
            "gives": pass_type.gives.label if pass_type.gives else None,
            "plugin": loaded.origins[name],
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
        for name, pass_type in loaded.passes.items()
    }
    return {"passes": passes, "pipelines": loaded.pipelines}
