"""`stagec validate`: published figures beside those computed here."""

from __future__ import annotations

from typing import Any

import click

from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show
from stagec.support.diagnostics import error


@click.command("validate")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON list; of the others one object."
)
@click.option("--time", "steps", is_flag=True, help="Compare measured seconds of steps.")
@click.option("--memory", is_flag=True, help="Compare measured bytes, by category and moment.")
@click.option("--source", metavar="NAME", help="Of --time and --memory: the rows of one source.")
@click.option("--all", "all_rows", is_flag=True, help="Of --time: all steps of the long sources.")
def command(**given: Any) -> int:
    """Compile the models of the library and compare with what has been published; exit code 1 if a
    row is off.

    With --time steps that were measured are predicted, with --memory what frameworks hold,
    whatever the errors. What is published is a distribution of its own: pip install
    'stagec[validation]'; a checkout has it.
    """
    from stagec.validation.answer import validate_figures, validate_memory, validate_steps

    if given["steps"] and given["memory"]:
        raise error("--time and --memory are two questions", remedy="ask one of them")
    if given["all_rows"] and not given["steps"]:
        raise error("--all is about steps", remedy="add --time")
    if given["source"] and not (given["steps"] or given["memory"]):
        raise error("--source is about measured rows", remedy="add --time or --memory")
    given["output"] = None
    if given["memory"]:
        show(validate_memory(given["source"], the_session()), given)
        return 0
    if given["steps"]:
        show(validate_steps(given["source"], the_session(), everything=given["all_rows"]), given)
        return 0
    figures = validate_figures()
    show(figures, given)
    return int(not figures.ok)
