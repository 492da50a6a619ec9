"""`stagec validate`: published figures beside those computed here."""

from __future__ import annotations

from typing import Any

import click

from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show
from stagec.support.diagnostics import error


@click.command("validate")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list; of --time one object.")
@click.option("--time", "steps", is_flag=True, help="Compare measured seconds of steps.")
@click.option("--source", metavar="NAME", help="Of --time: the steps of one source.")
@click.option("--all", "all_rows", is_flag=True, help="Of --time: all steps of the long sources.")
def command(**given: Any) -> int:
    """Compile the models of the library and compare with what has been published; exit code 1 if a
    row is off.

    With --time steps that were measured are predicted, whatever the errors. What is published is a
    distribution of its own: pip install 'stagec[validation]'; a checkout has it.
    """
    from stagec.validation.answer import validate_figures, validate_steps

    wrong = next((n for n in ("source", "all_rows") if given[n] and not given["steps"]), None)
    if wrong is not None:
        raise error(f"--{wrong.removesuffix('_rows')} is about steps", remedy="add --time")
    given["output"] = None
    if given["steps"]:
        show(validate_steps(given["source"], the_session(), everything=given["all_rows"]), given)
        return 0
    figures = validate_figures()
    show(figures, given)
    return int(not figures.ok)
