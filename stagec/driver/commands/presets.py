"""`stagec presets`: published runs as strategy texts."""

from typing import Any

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.show import LISTING, Listing, show_list, write_output
from stagec.models import presets
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
    rows: list[dict[str, Any]] = [
        {
            "name": p.name,
            "title": p.title,
            "model": p.model,
            "sizes": dict(p.values),
            "step": dict(p.step),
        }
        for p in known.values()
    ]
    cells = [
        (row["name"], row["title"], row["model"], ", ".join(f"{n} = {v}" for n, v in sizes.items()))
        for row in rows
        for sizes in [{**row["sizes"], **row["step"]}]
    ]
    head = "Presets", "name", "run", "model", "sizes"
    show_list(Listing(rows, head, cells), given, _HINT)
