"""Writes docs/reference/commands: a page for each command, from its help, with an example of
docs/examples/commands.toml. The output of an example is taken from the existing page:
tests/unit/test_docs.py compares it with the output of the command, and updates it.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache

import click

from stagec.driver.cli import SECTIONS, cli
from stagec.driver.shell.click_options import RareOption
from stagec.jobs.request.flags import FLAGS
from tools.markup import ROOT, markdown, page

_INTRO = (
    "The commands of `stagec`, with what `--help` says of each. Flags of a strategy, which several "
    "commands take, are in [flags.md](../flags.md); [commands.md](../../commands.md) shows the "
    "commands at work, with exit codes."
)
_SHARED = (
    "It takes the [flags of a strategy](../flags.md) as well. Options marked * are shown by "
    "`--help-all` only."
)


def command_pages() -> dict[str, str]:
    """The index, and a page for each command."""
    commands = {name: _command(name) for names in SECTIONS.values() for name in names}
    return {
        "index": page("Commands", _INTRO, _index()),
        **{
            name: page(f"`stagec {name}`", _usage(name, command), _body(command))
            for name, command in commands.items()
        },
    }


def _index() -> Iterator[str]:
    for title, commands in SECTIONS.items():
        yield from (f"## {title}", "", "| command | |", "|---|---|")
        yield from (f"| [`{name}`]({name}.md) | {line} |" for name, (_, line) in commands.items())
        yield ""


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command


def _usage(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"stagec {name}")
    return f"    stagec {name} {' '.join(command.collect_usage_pieces(context))}"


def _body(command: click.Command) -> Iterator[str]:
    context = click.Context(command)
    yield from (*markdown(inspect.cleandoc(command.help or "").replace("\b\n", "")), "")
    options = [p for p in command.params if isinstance(p, click.Option) and _shown(p)]
    own = [option for option in options if option.name not in FLAGS]
    if len(own) < len(options):
        yield from (_SHARED, "")
    if own:
        yield from ("| option | values | meaning |", "|---|---|---|")
    yield from (_row(option, context) for option in own)
    yield from ("", *_example(command.name or ""))


_PROMPT = re.compile(r"^\$ (.*)\n", re.M)
#: Commands that need other programs, whose examples are not run.
_NOT_RUN = ("simulate",)


@cache
def _examples() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "examples" / "commands.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _example(name: str) -> Iterator[str]:
    """The example of a command, with the output that its page shows. Raises ValueError for a
    command without one."""
    commands = _examples().get(name)
    if commands is None:
        raise ValueError(f"docs/examples/commands.toml has no example of '{name}'")
    if name in _NOT_RUN:
        yield from ("Example:", "", *(f"    {command}" for command in commands))
        return
    printed = _printed(name, commands)
    lines = (line for c in commands for line in (f"$ {c}", *printed[c].splitlines()))
    yield from ("Example:", "", "```console", *lines, "```")


def _printed(name: str, commands: Sequence[str]) -> dict[str, str]:
    """The output of each command on the page; empty if the page has other commands."""
    path = ROOT / "docs" / "reference" / "commands" / f"{name}.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    block = re.search(r"^```console\n(.*?)^```$", text, re.M | re.DOTALL)
    parts = _PROMPT.split(block[1]) if block is not None else []
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    return shown if list(shown) == list(commands) else dict.fromkeys(commands, "")


def _shown(option: click.Option) -> bool:
    return isinstance(option, RareOption) or not option.hidden


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    rare = " *" if isinstance(option, RareOption) else ""
    values = "" if option.is_flag else f"`{option.make_metavar(context)}`"
    cells = (names + rare, values, " ".join((option.help or "").split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(*command_pages().values(), sep="\n")
