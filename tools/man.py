"""Writes man pages of `stagec` and its commands: `python -m tools.man [FOLDER]`, build/man by
default."""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any, cast

import click
from click_man import core

import stagec
from stagec.driver.cli import COMMANDS, cli

#: The beginnings of lines that are requests to the formatter of man pages.
_REQUEST = re.compile(r"^(?=[.'])", re.M)


def main(argv: list[str]) -> int:
    """Write all pages."""
    folder = Path(argv[0]) if argv else Path("build/man")
    folder.mkdir(parents=True, exist_ok=True)
    top = click.Context(cli, info_name="stagec")
    contexts = {"stagec": top}
    for name, (_, line) in COMMANDS.items():
        command = cli.get_command(top, name)
        assert command is not None
        command.short_help = line
        command.help = _REQUEST.sub(r"\\&", cleandoc(command.help or ""))
        contexts[f"stagec-{name}"] = click.Context(command, info_name=name, parent=top)
        cast("click.Group", cli).commands[name] = command
    for name, context in contexts.items():
        text = str(cast("Any", core).generate_man_page(context, stagec.__version__))
        (folder / f"{name}.1").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
