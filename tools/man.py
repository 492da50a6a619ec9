"""Writes man pages of `stagec` and its commands: `python -m tools.man [FOLDER]`, build/man by
default."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import click
from click_man import core

import stagec
from stagec.driver.cli import COMMANDS, cli


def main(argv: list[str]) -> int:
    """Write all pages."""
    folder = Path(argv[0]) if argv else Path("build/man")
    folder.mkdir(parents=True, exist_ok=True)
    top = click.Context(cli, info_name="stagec")
    contexts = {"stagec": top}
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        contexts[f"stagec-{name}"] = click.Context(command, info_name=name, parent=top)
    for name, context in contexts.items():
        text = str(cast("Any", core).generate_man_page(context, stagec.__version__))
        (folder / f"{name}.1").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
