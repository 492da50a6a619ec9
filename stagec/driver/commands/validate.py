"""`stagec validate`: a comparison of published figures with computed ones."""

from typing import Any

import click

from stagec.driver.shell.click_options import takes
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show
from stagec.jobs.request.result import FORM, form_of
from stagec.support.diagnostics import error

#: The options for measured rows, and the names of their values.
_ROWS = {"time": "steps", "memory": "memory", "serve": "servers"}


@click.command("validate")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON list; with another option one object."
)
@takes(FORM)
@click.option("--time", "steps", is_flag=True, help="Compare measured seconds of steps.")
@click.option("--memory", is_flag=True, help="Compare measured bytes, by category and moment.")
@click.option("--serve", "servers", is_flag=True, help="Compare measured seconds of servers.")
@click.option("--source", metavar="NAME", help="With measured rows: those of one source.")
@click.option(
    "--all",
    "all_rows",
    is_flag=True,
    help="With --time and --serve: compare all rows, not a sample.",
)
def command(**given: Any) -> int:
    """Compile the models of the library and compare them with published figures; exit code 1 if a
    row differs.

    --time predicts measured steps, --memory the bytes that frameworks hold, --serve times to the
    first token and between tokens; their errors do not change the exit code. Published figures are
    a distribution of their own: pip install 'stagec[validation]'; a checkout has it.
    """
    from stagec.validation.answer import (
        validate_figures,
        validate_memory,
        validate_servers,
        validate_steps,
    )

    form_of(given)
    asked = [name for name in _ROWS.values() if given[name]]
    names = ", ".join(f"--{option}" for option in _ROWS)
    if len(asked) > 1:
        raise error(f"{names} cannot be used together", remedy="give one of them")
    if given["all_rows"] and not (given["steps"] or given["servers"]):
        raise error(
            "--all needs --time or --serve, which have long sources", remedy="add one of them"
        )
    if given["source"] and not asked:
        raise error("--source needs the kind of its measured rows", remedy=f"add one of {names}")
    given["output"] = None
    if given["memory"]:
        show(validate_memory(given["source"], the_session()), given)
        return 0
    if given["servers"]:
        show(validate_servers(given["source"], the_session(), everything=given["all_rows"]), given)
        return 0
    if given["steps"]:
        show(validate_steps(given["source"], the_session(), everything=given["all_rows"]), given)
        return 0
    figures = validate_figures()
    show(figures, given)
    return int(not figures.ok)
