"""`stagec presets`: published runs as strategy texts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

import click

from stagec.driver.shell import completion
from stagec.driver.shell.listing import LISTING, Listing, show_list
from stagec.driver.shell.options import takes
from stagec.driver.shell.show import write_output
from stagec.models import Preset, presets
from stagec.support.named import find

_HINT = (
    "'stagec compile --preset NAME -o DIR' compiles one; 'stagec presets NAME' prints its "
    "text; --pp, --dp, --tp and --set change single sizes."
)


@click.command("presets")
@click.argument("name", required=False, shell_complete=completion.COMPLETERS["presets"])
@takes(*LISTING)
def command(name: str | None, **given: Any) -> None:
    """List the presets, or print the text of mesh and strategy of one: a file that can be changed
    and given as STRATEGY."""
    known = presets()
    if name is not None:
        write_output(find("preset", name, known).text, None)
        return
    rows = [
        {
            "name": p.name,
            "title": p.title,
            "model": p.model,
            "sizes": dict(p.values),
            "step": dict(p.step),
        }
        for p in known.values()
    ]
    show_list(Listing(rows, partial(_print_table, known)), given, _HINT)


def _print_table(known: Mapping[str, Preset], stream: TextIO) -> None:
    from stagec.output.tables import console, table

    rows = table("Presets", "name", "run", "model", "sizes", text_columns=4)
    for p in known.values():
        sizes = ", ".join(f"{n} = {v}" for n, v in {**p.values, **p.step}.items())
        rows.add_row(p.name, p.title, p.model, sizes)
    console(stream, 150).print(rows)
