"""`stagec ops`: lists the ops of the language, or describes one."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from stagec.driver.shell.show import write_output
from stagec.ir.opdef import OpDef, Registry
from stagec.ir.param import Arity, Param
from stagec.ir_spec.strategy.statement import Statement
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import error


@click.command("ops")
@click.argument("name", required=False)
@click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file.")
def command(name: str | None, plugin: tuple[Path, ...]) -> None:
    """List the ops, or describe the op NAME."""
    registry = load_plugins(plugin).registry
    write_output(_description(registry, name) if name else _listing(registry), None)


def _listing(registry: Registry) -> str:
    ops = sorted(registry, key=lambda op: op.name)
    width = max(len(op.name) for op in ops)
    return "".join(f"{op.name:<{width}}  {summary(op)}\n" for op in ops)


def summary(op: OpDef) -> str:
    """The first paragraph of the documentation, in one line."""
    return _doc(op).partition("\n\n")[0].replace("\n", " ")


def _description(registry: Registry, name: str) -> str:
    op = registry.get(name) or registry.get(f"stg.{name}")
    if op is None:
        raise error(f"unknown op '{name}'", remedy=registry.suggest(name))
    lines = [op.name, "", _doc(op), ""]
    lines += [f"operands: {_names(op.takes)}"]
    lines += [f"results: {_names(op.gives)}"]
    lines += ["parameters:" if op.params else "parameters: none"]
    lines += [_param(p) for p in op.params]
    if isinstance(op, Statement) and op.flags:
        lines += [f"flags: {', '.join(flag.option for flag in op.flags)}"]
    if op.example:
        lines += ["", "example:", *(f"  {line}" for line in op.example.splitlines())]
    return "\n".join(lines) + "\n"


def _param(param: Param) -> str:
    traits = [param.kind]
    traits += ["positional"] if param.positional else []
    traits += ["required"] if param.required else []
    traits += [f"one of {', '.join(param.choices)}"] if param.choices else []
    return f"  {param.name} ({', '.join(traits)}): {param.doc}"


def _names(arity: Arity) -> str:
    return (", ".join(arity.names) or "none") + (", ..." if arity.most is None else "")


def _doc(op: OpDef) -> str:
    return inspect.getdoc(op) or ""
