"""`stagec ops`: lists the ops of the language, or describes one."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.show import LISTING, Listing, show_list
from stagec.ir.opdef import OpDef
from stagec.ir.param import Arity, Param
from stagec.ir_spec.strategy.statement import Statement
from stagec.jobs.request.option import PLUGIN
from stagec.output.report import Report
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import error

_HINT = "'stagec ops NAME' describes one, with its parameters and an example."


@click.command("ops")
@click.argument("name", required=False, shell_complete=completion.COMPLETERS["ops"])
@takes(*LISTING, PLUGIN)
def command(name: str | None, plugin: tuple[Path, ...], **given: Any) -> None:
    """List the ops, or describe the op NAME."""
    registry = load_plugins(plugin).registry
    if name is None:
        rows = [_row(op) for op in sorted(registry, key=lambda op: op.name)]
        cells = [(row["name"], row["summary"]) for row in rows]
        show_list(Listing(rows, ("Ops", "name", "what it does"), cells, 160), given, _HINT)
        return
    op = registry.get(name) or registry.get(f"stg.{name}")
    if op is None:
        raise error(f"unknown op '{name}'", remedy=registry.suggest(name))
    show_list(_Described(op), given)


@dataclass(frozen=True)
class _Described(Report):
    """An op."""

    op: OpDef

    def as_json(self) -> list[dict[str, Any]]:
        return [_row(self.op)]

    def print(self, stream: TextIO) -> None:
        _print_description(self.op, stream)


def summary(op: OpDef) -> str:
    """The first paragraph of the documentation, in one line."""
    return _doc(op).partition("\n\n")[0].replace("\n", " ")


def _row(op: OpDef) -> dict[str, Any]:
    """The JSON of an op: its summary, the names of its operands and results, its parameters."""
    return {
        "name": op.name,
        "summary": summary(op),
        "operands": _names(op.takes),
        "results": _names(op.gives),
        "parameters": [
            {"name": p.name, "type": p.kind, "required": p.required, "help": p.doc}
            for p in op.params
        ],
        "flags": _flags(op),
    }


def _print_description(op: OpDef, stream: TextIO) -> None:
    lines = [op.name, "", _doc(op), ""]
    lines += [f"operands: {', '.join(_names(op.takes)) or 'none'}"]
    lines += [f"results: {', '.join(_names(op.gives)) or 'none'}"]
    lines += ["parameters:" if op.params else "parameters: none"]
    lines += [_param(p) for p in op.params]
    if flags := _flags(op):
        lines += [f"flags: {', '.join(flags)}"]
    if op.example:
        lines += ["", "example:", *(f"  {line}" for line in op.example.splitlines())]
    stream.write("\n".join(lines) + "\n")


def _param(param: Param) -> str:
    traits = [param.kind]
    traits += ["positional"] if param.positional else []
    traits += ["required"] if param.required else []
    traits += [f"one of {', '.join(param.choices)}"] if param.choices else []
    return f"  {param.name} ({', '.join(traits)}): {param.doc}"


def _names(arity: Arity) -> list[str]:
    """The names of operands or results; `...` means any number of further ones."""
    return [*arity.names, *(["..."] if arity.most is None else [])]


def _flags(op: OpDef) -> list[str]:
    """The flags of a statement of the strategy."""
    return [flag.option for flag in op.flags] if isinstance(op, Statement) else []


def _doc(op: OpDef) -> str:
    return inspect.getdoc(op) or ""
