"""`stagec models`: the model library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.show import LISTING, show_list, write_output
from stagec.importers.library import model_layers, model_sizes, model_source
from stagec.models import LibraryModel, library
from stagec.output.report import Report
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

_HINT = (
    "'stagec models NAME' prints a model's text; "
    "'stagec analyze NAME --set L=2,S=4096' overrides its sizes."
)


@click.command("models")
@click.argument("name", required=False, shell_complete=completion.COMPLETERS["models"])
@takes(*LISTING)
def command(name: str | None, **given: Any) -> None:
    """List the models of the library, or print the STG text of one with its values."""
    models = library()
    if name is not None:
        if name not in models:
            raise error(
                f"no model '{name}' in the library",
                remedy=did_you_mean(name, models) or "'stagec models' lists them",
            )
        write_output(model_text(models[name]), None)
        return
    show_list(_Models([*models.values()]), given, _HINT)


def model_text(model: LibraryModel) -> str:
    """The text of a model with the values of the library, as a complete file."""
    from stagec.jobs.builder import set_symbols
    from stagec.pipeline.plugins import load_plugins
    from stagec.text.build import parse_module
    from stagec.text.printer import print_module

    source = model_source(model)
    if not model.values:
        return source.text
    module = parse_module(source, load_plugins(()).registry)
    set_symbols(module, model.values)
    return print_module(module)


#: Column -> the names of sizes, of which the first one that the model has is shown.
_COLUMNS = {
    "width": ("D",),
    "heads": ("H",),
    "KV heads": ("G", "H"),
    "feed-forward": ("F", "M"),
    "experts": ("E",),
    "vocabulary": ("V",),
    "sequence": ("S",),
}


def _first(sizes: Mapping[str, int], *names: str) -> str:
    return next((str(sizes[n]) for n in names if n in sizes), "")


@dataclass(frozen=True)
class _Models(Report):
    """The models of the library."""

    models: Sequence[LibraryModel]

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"name": m.name, "title": m.title, "text": m.text_name, "sizes": dict(model_sizes(m))}
            for m in self.models
        ]

    def print(self, stream: TextIO) -> None:
        """Print a line for each model; on a narrow terminal without its title and sequence."""
        from stagec.output.tables import NARROW, console, table

        out = console(stream, 140)
        narrow = out.width < NARROW
        about = ("name",) if narrow else ("name", "model")
        shown = {n: each for n, each in _COLUMNS.items() if not (narrow and n == "sequence")}
        rows = (
            (
                *(m.name, m.title)[: len(about)],
                str(model_layers(m) or ""),
                *(_first(model_sizes(m), *each) for each in shown.values()),
            )
            for m in self.models
        )
        out.print(table("Models", *about, "layers", *shown, rows=rows, text_columns=len(about)))
