"""`stagec stacks`: the defaults of software releases, as statements of strategies."""

from typing import Any

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import LISTING, Listing, show_list, write_output
from stagec.ir.opdef import Registry
from stagec.jobs.session import Session
from stagec.jobs.stack import read_stack, stack_source
from stagec.models import stacks
from stagec.pipeline.plugins import load_plugins
from stagec.text.build import parse_op

_HINT = "'stagec stacks NAME' prints one with the source of each line; --stack NAME takes it."


@click.command("stacks")
@click.argument(
    "name", metavar="[NAME|FILE]", required=False, shell_complete=completion.COMPLETERS["stacks"]
)
@takes(*LISTING)
def command(name: str | None, **given: Any) -> None:
    """List the stacks, or print the text of one, in which comments state the source of each line. A
    file of your own is checked; docs/stacks.md says how to write one."""
    session, registry = the_session(), load_plugins(()).registry
    if name is not None:
        read_stack(name, session, registry)
        write_output(stack_source(name, session).text, None)
        return
    rows = [_row(each, session, registry) for each in stacks()]
    cells = [(row["name"], row["version"], ", ".join(row["statements"])) for row in rows]
    head = "Stacks", "name", "version", "defaults of"
    show_list(Listing(rows, head, cells), given, _HINT)


def _row(name: str, session: Session, registry: Registry) -> dict[str, Any]:
    """A stack: its name, its version, and the statements for which it has defaults."""
    version = parse_op(stack_source(name, session), registry).text("version")
    lines = read_stack(name, session, registry)
    statements = dict.fromkeys(line.op.name.removeprefix("stg.") for line in lines)
    return {"name": name, "version": version, "statements": [*statements]}
