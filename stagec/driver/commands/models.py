"""`stagec models`: the model library."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import click

from stagec.driver.output.common import write_output
from stagec.driver.output.streams import tell
from stagec.importers.library import model_sizes, model_source
from stagec.models import LibraryModel, library
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean


@click.command("models")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def command(name: str | None, as_json: bool) -> None:
    """List the models of the library, or print the STG text of one with its values."""
    models = library()
    if name is not None:
        if name not in models:
            raise error(
                f"no model '{name}' in the library",
                remedy=did_you_mean(name, models) or "'stagec models' lists them",
            )
        write_output(model_text(models[name]), None)
    elif as_json:
        rows = [
            {"name": m.name, "title": m.title, "text": m.text_name, "sizes": dict(model_sizes(m))}
            for m in models.values()
        ]
        write_output(json.dumps(rows, indent=1) + "\n", None)
    else:
        _print_table(models)


def model_text(model: LibraryModel) -> str:
    """The model's text with the values of the library, as a file of its own."""
    from stagec.driver.job.builder import set_symbols
    from stagec.pipeline.plugins import load_plugins
    from stagec.text.build import parse_module
    from stagec.text.printer import print_module

    source = model_source(model)
    if not model.values:
        return source.text
    module = parse_module(source, load_plugins(()).registry)
    set_symbols(module, model.values)
    return print_module(module)


#: What each column shows: the first of these sizes that the model has.
_COLUMNS = (("L",), ("D",), ("H",), ("G", "H"), ("F", "M"), ("E",), ("V",), ("S",))


def _first(sizes: Mapping[str, int], *names: str) -> str:
    if names == ("L",):  # of all kinds
        return str(sum(size for n, size in sizes.items() if n == "L" or n.startswith("L_")) or "")
    return next((str(sizes[n]) for n in names if n in sizes), "")


def _print_table(models: Mapping[str, LibraryModel]) -> None:
    from stagec.driver.output.tables import console, table

    rows = table(
        "Models",
        "name",
        "model",
        "layers",
        "width",
        "heads",
        "KV heads",
        "feed-forward",
        "experts",
        "vocabulary",
        "sequence",
        text_columns=2,
    )
    for m in models.values():
        sizes = model_sizes(m)
        rows.add_row(m.name, m.title, *(_first(sizes, *names) for names in _COLUMNS))
    console(sys.stdout, 140).print(rows)
    tell("'stagec models NAME' prints a model's text; --set L=2,S=4096 overrides its sizes.")
