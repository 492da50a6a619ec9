"""`stagec validate`: published figures beside those computed here."""

from __future__ import annotations

from typing import Any

import click

from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show
from stagec.support.diagnostics import error


@click.command("validate")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON list; of --time and --serve one object."
)
@click.option("--time", "steps", is_flag=True, help="Compare measured seconds of steps.")
@click.option("--serve", "servers", is_flag=True, help="Compare measured seconds of servers.")
@click.option("--source", metavar="NAME", help="Of --time, --serve: the rows of one source.")
@click.option("--all", "all_rows", is_flag=True, help="Of --time, --serve: all rows, no sample.")
def command(**given: Any) -> int:
    """Compile the models of the library and compare with what has been published; exit code 1 if a
    row is off.

    With --time steps that were measured are predicted, with --serve times to the first token and
    between tokens of servers, whatever the errors. What is published is a
    distribution of its own: pip install 'stagec[validation]'; a checkout has it.
    """
    from stagec.validation.answer import validate_figures, validate_servers, validate_steps

    rows = given["steps"] or given["servers"]
    wrong = next((n for n in ("source", "all_rows") if given[n] and not rows), None)
    if wrong is not None:
        name = wrong.removesuffix("_rows")
        raise error(f"--{name} is about measured rows", remedy="add --time or --serve")
    if given["steps"] and given["servers"]:
        raise error("--time and --serve ask for different rows", remedy="give one of them")
    given["output"] = None
    if given["servers"]:
        show(validate_servers(given["source"], the_session(), everything=given["all_rows"]), given)
        return 0
    if given["steps"]:
        show(validate_steps(given["source"], the_session(), everything=given["all_rows"]), given)
        return 0
    figures = validate_figures()
    show(figures, given)
    return int(not figures.ok)
